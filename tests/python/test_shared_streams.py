"""Groups of the same processes over one TCP connection each way (``shared_streams``)."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, WATCHDOG_SECONDS, World, descriptors, fresh_store, join, leaving_together
from test_footprint import settled

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="its own setting")

GROUPS = 8
LENGTHS = (1, 1000, 30_000, 300_000)


def sharing(**hints: str) -> dist.ProcessGroup:
    """A group that shares connections unless hints say otherwise."""
    return dist.new_group(backend=BACKEND, pg_options=ncclx_rs.Options(hints={"shared_streams": "on"} | hints))


def in_threads(works: Sequence[Callable[[], None]]) -> None:
    """Runs all at once; the first error is that of the call."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def exchange(group: dist.ProcessGroup, rank: int, size: int, number: int, turns: int) -> None:
    """Collectives and messages of many lengths in one group, of which every byte is checked."""
    for turn in range(turns):
        length = LENGTHS[(turn + number) % len(LENGTHS)]
        data = torch.full((length,), float(rank + number))
        dist.all_reduce(data, group=group)
        assert torch.equal(data, torch.full((length,), float(sum(range(size)) + size * number))), (number, turn)
        rows = torch.arange(size * length, dtype=torch.int64) + rank * 1_000_003 + number
        result = torch.empty_like(rows)
        dist.all_to_all_single(result, rows, group=group)
        for other in range(size):
            part = result[other * length : (other + 1) * length]
            first = rank * length + other * 1_000_003 + number
            assert torch.equal(part, torch.arange(length, dtype=torch.int64) + first), (number, turn, other)
        right, left = (rank + 1) % size, (rank - 1) % size
        received = torch.empty(length, dtype=torch.int64)
        sent = dist.isend(rows[:length], right, group=group, tag=turn)
        dist.recv(received, left, group=group, tag=turn)
        sent.wait()
        assert torch.equal(received, torch.arange(length, dtype=torch.int64) + left * 1_000_003 + number)


def all_groups_work_at_once(rank: int, size: int, hints: dict[str, str]) -> None:
    groups = [sharing(**hints) for _ in range(GROUPS)]
    in_threads([lambda n=n, g=g: exchange(g, rank, size, n, 8) for n, g in enumerate(groups)])
    # And by works in flight, which threads of the engine make progress on.
    tensors = [[torch.full((length,), float(rank)) for length in LENGTHS] for _ in groups]
    works = [
        dist.all_reduce(tensor, group=group, async_op=True)
        for number in range(len(LENGTHS))
        for group, of_group in zip(groups, tensors, strict=True)
        for tensor in of_group[number : number + 1]
    ]
    for work in works:
        work.wait()
    assert all(torch.all(tensor == float(sum(range(size)))) for of_group in tensors for tensor in of_group)


def connections_stay_two_a_peer(rank: int, size: int) -> None:
    first = sharing()
    exchange(first, rank, size, 0, 4)
    settled()
    dist.barrier()
    before = descriptors()
    dist.barrier()
    groups = [sharing() for _ in range(GROUPS)]
    for number, group in enumerate(groups):
        exchange(group, rank, size, number, 4)
    # A poller of two and a listener for each group, and nothing for its peers.
    used = descriptors(before + 3 * GROUPS)
    assert used <= before + 3 * GROUPS, (before, used)
    for peer in peers(groups[0]):
        assert peer["lane"]["lanes"] == GROUPS + 1, peer
    dist.barrier()
    while groups:
        dist.destroy_process_group(groups.pop())
    del group
    assert (after := descriptors(before)) <= before, (before, after)
    exchange(first, rank, size, 0, 4)
    assert {peer["lane"]["lanes"] for peer in peers(first)} == {1}
    dist.barrier()
    # The last one takes the connections with it: one each way for each peer, and the poller of all.
    dist.destroy_process_group(first)
    del first
    after = descriptors(before - 3 - 2 * (size - 1) - 2)
    assert after <= before - 3 - 2 * (size - 1) - 2, (before, after)


def peers(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """What a group's flight recorder tells of the others."""
    with tempfile.TemporaryDirectory() as folder:
        dumps = [json.loads(file.read_text()) for file in ncclx_rs.dump(folder)]
    [dump] = [dump for dump in dumps if dump["communicator"] == group.group_name]
    return [peer for peer in dump["peers"] if peer["lane"] is not None]


def an_aborted_group_leaves_the_others(rank: int, size: int) -> None:
    groups = [sharing() for _ in range(4)]
    for number, group in enumerate(groups):
        exchange(group, rank, size, number, 2)
    dist.barrier()
    # In the middle of long messages, of which some ranks take nothing.
    stuck = [dist.isend(torch.ones(4_000_000), other, group=groups[0]) for other in range(size) if other != rank]
    if rank == 0:
        groups[0].abort()
    threads = [lambda n=n, g=g: exchange(g, rank, size, n, 8) for n, g in enumerate(groups) if n > 0]
    in_threads(threads)
    if rank != 0:
        groups[0].abort()
    for work in stuck:
        # Of two ranks that both send, one may have ended from a copy.
        with suppress(dist.DistBackendError):
            work.wait()
    with pytest.raises(dist.DistBackendError):
        dist.barrier(groups[0])
    in_threads(threads)


def all_groups_name_a_rank_that_dies(rank: int, size: int) -> None:
    victim = size - 1
    join(timeout=300)
    store = fresh_store()
    groups = [sharing() for _ in range(GROUPS)]
    for number, group in enumerate(groups):
        exchange(group, rank, size, number, 2)
    if rank == victim:
        store.wait([f"ready{r}" for r in range(victim)], timedelta(seconds=WATCHDOG_SECONDS))
        os.kill(os.getpid(), signal.SIGKILL)
    # Some wait for a message of the victim, others for a collective with it, and others have nothing in flight.
    works: list[Any] = []
    for number, group in enumerate(groups):
        if number % 3 == 0:
            works.append(dist.irecv(torch.empty(3), src=victim, group=group))
        elif number % 3 == 1:
            works.append(dist.all_reduce(torch.ones(1000), group=group, async_op=True))
    store.set(f"ready{rank}", "yes")
    with leaving_together(range(victim)):
        for work in works:
            with pytest.raises(dist.DistBackendError, match=rf"rank {victim} is lost"):
                work.wait()
        for group in groups:
            with pytest.raises(dist.DistBackendError, match=rf"barrier(.|\n)*rank {victim} is lost"):
                dist.barrier(group)


def ranks_with_different_settings_work(rank: int, size: int) -> None:
    """Each pair shares connections if both ranks have it set, and has connections of its own otherwise."""
    groups = [sharing(shared_streams="on" if rank % 2 == 0 else "off") for _ in range(3)]
    groups.append(sharing(tcp_streams="2" if rank == 0 else "1"))
    groups.append(sharing(peer_timeout_seconds="20" if rank == 1 else "30"))
    groups.append(sharing())
    in_threads([lambda n=n, g=g: exchange(g, rank, size, n, 6) for n, g in enumerate(groups)])
    shared = {peer["rank"] for peer in peers(groups[0])}
    assert shared == ({other for other in range(0, size, 2) if other != rank} if rank % 2 == 0 else set())
    assert len(peers(groups[-1])) == size - 1
    assert 0 not in {peer["rank"] for peer in peers(groups[3])}
    dist.barrier()


def a_forked_child_takes_nothing(rank: int, size: int) -> None:
    groups = [sharing() for _ in range(3)]
    for number, group in enumerate(groups):
        exchange(group, rank, size, number, 2)
    child = os.fork()
    if child == 0:
        del groups
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    in_threads([lambda n=n, g=g: exchange(g, rank, size, n, 6) for n, g in enumerate(groups)])


@pytest.mark.worlds(sizes=(4,), modes=("tcp",))
@pytest.mark.parametrize("hints", [{}, {"tls": "on"}], ids=["plain", "tls"])
def test_all_groups_work_at_once(world: World, hints: dict[str, str]) -> None:
    world.run(all_groups_work_at_once, hints)


@pytest.mark.worlds(sizes=(4,), modes=("tcp",))
def test_connections_stay_two_a_peer(world: World) -> None:
    world.run(connections_stay_two_a_peer)


@pytest.mark.worlds(sizes=(3,), modes=("tcp",))
def test_an_aborted_group_leaves_the_others(fresh_world: World) -> None:
    fresh_world.run(an_aborted_group_leaves_the_others)


@pytest.mark.worlds(sizes=(4,), modes=("tcp",))
def test_all_groups_name_a_rank_that_dies(fresh_world: World) -> None:
    fresh_world.run(all_groups_name_a_rank_that_dies, join=False, dies={fresh_world.size - 1})


@pytest.mark.worlds(sizes=(4,), modes=("tcp",))
def test_ranks_with_different_settings_work(world: World) -> None:
    world.run(ranks_with_different_settings_work)


@pytest.mark.worlds(sizes=(2,), modes=("tcp",))
def test_a_forked_child_takes_nothing(fresh_world: World) -> None:
    fresh_world.run(a_forked_child_takes_nothing)
