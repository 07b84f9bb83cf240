"""Late, lost and aborted ranks: the other ranks get an error that names the operation and the rank."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import MODES, WATCHDOG_SECONDS, World, fresh_store, join, leaving_together, meet, set_timeout
from test_mismatch import call

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")
SHORT = 2.0


def names(rank: int) -> str:
    """A pattern for "rank 3" and lists of ranks that contain 3, except ranks without fault and the peer in a call."""
    return rf"(?s)\brank(s|\(s\))? \[?(\d+, )*{rank}\b(?!(, \d+)* did\b(?! not))(?!, (tag|window) )"


def missing_and_callers(message: str) -> tuple[list[int], list[int]]:
    """The ranks that have not called a collective and those that have, from the text of its timeout."""
    found = re.search(r"collective \d+: rank\(s\) ([\d, ]+) did not call it; rank\(s\) ([\d, ]+) did\b", message)
    assert found, message
    missing, came = ([int(rank) for rank in ranks.split(", ")] for ranks in found.groups())
    return missing, came


def late_rank_is_named(rank: int, size: int, name: str, late: int, count: int) -> None:
    join(timeout=SHORT)
    dist.barrier()
    began = time.monotonic()
    with leaving_together():
        if rank == late:
            return
        with pytest.raises(dist.DistBackendError) as raised:
            call(name, size, count=count, root=late if name == "broadcast" else rank)
        message = str(raised.value)
        assert time.monotonic() - began >= SHORT * 0.9, f"gave up before the timeout: {message}"
        assert name in message, f"the operation is not named: {message}"
        assert missing_and_callers(message) == ([late], [r for r in range(size) if r != late]), message


def rooted_waits_for_members(rank: int, size: int) -> None:
    """A root that needs all ranks names the late one; other ranks need not fail."""
    join(timeout=SHORT)
    dist.barrier()
    with leaving_together():
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="gather") as raised:
                dist.gather(torch.ones(3), [torch.empty(3) for _ in range(size)], dst=0)
            assert missing_and_callers(str(raised.value)) == (list(range(1, size)), [0])


def receive_without_sender_names_the_peer(rank: int, size: int) -> None:
    join(timeout=SHORT)
    dist.barrier()
    with leaving_together():
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match=r"recv(.|\n)*rank 1"):
                dist.recv(torch.empty(3), src=1)
            with pytest.raises(dist.DistBackendError, match="recv"):
                dist.recv(torch.empty(3))


def async_timeout_surfaces_in_wait(rank: int, size: int) -> None:
    join(timeout=SHORT)
    dist.barrier()
    with leaving_together():
        if rank != 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            with pytest.raises(dist.DistBackendError, match="all_reduce") as raised:
                work.wait()
            assert missing_and_callers(str(raised.value)) == ([0], list(range(1, size)))
            assert work.is_completed() and not work.is_success() and work.exception() is not None


def absent_rank_is_named_at_init(rank: int, size: int) -> None:
    absent = size - 1
    with leaving_together():
        if rank == absent:
            return
        with pytest.raises(dist.DistBackendError, match=rf"ranks \[{absent}\] did not join"):
            join(join_timeout=SHORT)
            dist.all_reduce(torch.ones(1))  # a backend may connect to its peers at the first operation


def killed_rank_is_named(rank: int, size: int, how: str, count: int) -> None:
    victim = size - 1
    join(timeout=60)
    tensor = torch.ones(count)
    dist.all_reduce(tensor)
    meet()
    if rank == victim:
        if how == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    survivors = range(victim)
    with leaving_together(survivors):
        with pytest.raises(dist.DistBackendError) as raised:
            while True:  # the first may still complete with data that the victim had sent
                dist.all_reduce(tensor)
        message = str(raised.value)
        assert re.search(rf"all_reduce(.|\n)*rank {victim} is lost", message), message


def rank_killed_amid_a_collective_is_named(rank: int, size: int) -> None:
    victim = size - 1
    join(timeout=60)
    tensor = torch.ones(200_000)
    if rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with leaving_together(range(victim)):
        with pytest.raises(dist.DistBackendError, match=rf"all_reduce(.|\n)*rank {victim} is lost"):
            while True:
                dist.all_reduce(tensor)


def stopped_rank_is_named_by_who_waits_for_another(rank: int, size: int) -> None:
    """In a barrier of five, rank 0 waits for rank 1, which waits for rank 4; rank 2 waits for no rank."""
    victim = size - 1
    join(timeout=60)
    dist.barrier()
    pids = fresh_store()
    if rank == victim:
        pids.set("victim", str(os.getpid()))
        threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    if rank == victim - 1:
        time.sleep(1.6)  # the barrier must not end before the victim stops
    set_timeout(dist.group.WORLD, 5 if rank == 0 else 8)
    with leaving_together(range(victim)):
        with pytest.raises(dist.DistBackendError) as raised:
            while True:
                dist.barrier()
        message = str(raised.value)
        named = (
            rf"rank\(s\) 1 did not finish their part; rank\(s\) {victim} finished it or fell silent"
            if rank == 0
            else names(victim)
        )
        assert re.search(named, message), message
    if rank == 0:
        os.kill(int(pids.get("victim")), signal.SIGKILL)


def stopped_rank_takes_everything_once_it_goes_on(rank: int, size: int) -> None:
    """A rank stops amid messages from another. The others go on without it, and it misses nothing."""
    victim, count = size - 1, 1_000_000
    join(timeout=WATCHDOG_SECONDS)
    dist.all_reduce(torch.ones(3))
    pids = fresh_store()
    if rank == victim:
        pids.set("victim", str(os.getpid()))
        received = [torch.empty(count) for _ in range(20)]
        works = [dist.irecv(tensor, src=0) for tensor in received]
        for number, (work, tensor) in enumerate(zip(works, received, strict=True)):
            assert work is not None
            work.wait()
            assert torch.equal(tensor, torch.arange(count) + number)
            if number == 4:
                os.kill(os.getpid(), signal.SIGSTOP)
    elif rank in (0, 1):
        if rank == 0:
            sent = [torch.arange(count) + float(number) for number in range(20)]
            pid = int(pids.get("victim"))
            works = [dist.isend(tensor, dst=victim) for tensor in sent]
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.001)
        for number in range(50):
            # Each way between the first two, in pieces and in one.
            for length in (10, 100_000):
                tensor = torch.full((length,), float(number))
                if rank == 0:
                    dist.send(tensor, dst=1)
                    dist.recv(tensor, src=1)
                else:
                    dist.recv(tensor, src=0)
                    dist.send(tensor + 1, dst=0)
                assert rank != 0 or bool((tensor == number + 1).all())
        if rank == 0:
            os.kill(pid, signal.SIGCONT)
            for work in works:
                assert work is not None
                work.wait()
    tensor = torch.ones(count)
    dist.all_reduce(tensor)
    assert bool((tensor == size).all())


def peer_of_a_receive_dies(rank: int, size: int) -> None:
    join(timeout=60)
    dist.barrier()
    meet()
    if rank == 1:
        os._exit(3)
    with leaving_together([r for r in range(size) if r != 1]):
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match=r"recv(.|\n)*rank 1"):
                dist.recv(torch.empty(10), src=1)


def connection_to_a_gone_rank_is_refused(rank: int, size: int) -> None:
    join(timeout=60)  # no stream is open yet
    if rank == 1:
        os._exit(3)
    with leaving_together([r for r in range(size) if r != 1]):
        if rank == 0:
            with pytest.raises(
                dist.DistBackendError, match=r"send(.|\n)*rank 1 is lost(.|\n)*(refused|closed|reset|ended)"
            ):
                dist.send(torch.empty(1_000_000), dst=1)


def lack_of_shared_memory_is_named(rank: int, size: int) -> None:
    join(timeout=3)
    with leaving_together():
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        try:
            with pytest.raises(
                dist.DistBackendError, match=r"all_reduce(.|\n)*" + ("no shared memory" if rank == 0 else r"\brank 0\b")
            ):
                dist.all_reduce(torch.ones(1_000_000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def abort_ends_a_blocked_call(rank: int, size: int) -> None:
    join(timeout=300)
    dist.barrier()
    with leaving_together():
        if rank == 0:
            return
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        threading.Timer(0.5, backend.abort).start()
        # Several ranks abort at about the same time: each operation ends by its rank's abort or by another rank's.
        with pytest.raises(dist.DistBackendError, match="all_reduce(.|\n)*(abort|is lost)"):
            dist.all_reduce(torch.ones(100))
        backend.abort()
        with pytest.raises(dist.DistBackendError, match="abort"):
            dist.all_reduce(torch.ones(100))
        backend.abort()  # harmless


def new_group_works_after_a_timeout(rank: int, size: int) -> None:
    join(timeout=SHORT)
    with leaving_together():
        if rank != 0:
            with pytest.raises(dist.DistBackendError):
                dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
    join(store=fresh_store())
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(size)] * 10


def test_a_name_is_not_a_number_elsewhere_nor_one_of_those_that_came() -> None:
    text = "all_reduce timed out after 2.0s: collective 3: rank(s) 1, 12 did not call it; rank(s) 0, 2, 4 did"
    text += "; 0.4s ago rank(s) 12 had recv(8 bytes from rank 3, tag 0) of communicator `0` in flight, for 2.1s"
    assert [rank for rank in range(13) if re.search(names(rank), text)] == [1, 12]
    assert missing_and_callers(text) == ([1, 12], [0, 2, 4])
    assert [rank for rank in range(13) if re.search(names(rank), "ranks [5, 7] did not join within 2s")] == [5, 7]


@pytest.mark.worlds(sizes=(2,), modes=("shm", "tcp"))
@pytest.mark.parametrize("name", COLLECTIVES)
def test_late_rank_is_named_in_timeout(fresh_world: World, name: str) -> None:
    fresh_world.run(late_rank_is_named, name, 1, 10, join=False)


@pytest.mark.worlds(sizes=(3,))
@pytest.mark.parametrize("count", [10, 1_000_000])
def test_late_rank_is_named_by_all_others(fresh_world: World, count: int) -> None:
    fresh_world.run(late_rank_is_named, "all_reduce", 1, count, join=False)


@pytest.mark.worlds(sizes=(3,))
@pytest.mark.parametrize(
    "check",
    [
        rooted_waits_for_members,
        receive_without_sender_names_the_peer,
        async_timeout_surfaces_in_wait,
        absent_rank_is_named_at_init,
        abort_ends_a_blocked_call,
        new_group_works_after_a_timeout,
    ],
    ids=lambda check: check.__name__,
)
def test_failure(fresh_world: World, check) -> None:
    fresh_world.run(check, join=False)


@pytest.mark.worlds(sizes=(2, 3))
@pytest.mark.parametrize(("how", "count"), [("exit", 10), ("sigkill", 10), ("sigkill", 1_000_000)])
def test_killed_rank_is_named(fresh_world: World, how: str, count: int) -> None:
    fresh_world.run(killed_rank_is_named, how, count, join=False, dies={fresh_world.size - 1})


@pytest.mark.worlds(sizes=(2, 3))
def test_rank_killed_amid_a_collective_is_named(fresh_world: World) -> None:
    fresh_world.run(rank_killed_amid_a_collective_is_named, join=False, dies={fresh_world.size - 1})


@pytest.mark.parametrize("mode", ["shm", "tcp"])
def test_stopped_rank_is_named_by_a_rank_that_waits_for_another(mode: str) -> None:
    world = World(5, mode)
    world.run(stopped_rank_is_named_by_who_waits_for_another, join=False, dies={4})


@pytest.mark.parametrize(("size", "mode"), [*((3, mode) for mode in MODES), (4, "ucx")])
def test_stopped_rank_takes_everything_once_it_goes_on(size: int, mode: str) -> None:
    world = World(size, mode)
    world.run(stopped_rank_takes_everything_once_it_goes_on, join=False)
    world.close()


@pytest.mark.worlds(sizes=(2, 3))
def test_dead_peer_of_a_receive_is_named(fresh_world: World) -> None:
    fresh_world.run(peer_of_a_receive_dies, join=False, dies={1})


@pytest.mark.worlds(sizes=(2, 3), modes=("shm", "tcp"))
def test_connection_to_a_gone_rank_is_refused(fresh_world: World) -> None:
    fresh_world.run(connection_to_a_gone_rank_is_refused, join=False, dies={1})


@pytest.mark.worlds(sizes=(2, 3), modes=("shm",))
def test_lack_of_shared_memory_is_named(fresh_world: World) -> None:
    fresh_world.run(lack_of_shared_memory_is_named, join=False)
