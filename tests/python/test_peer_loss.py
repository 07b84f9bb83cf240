"""Ranks that end while no operation waits for them, forks, exits in any order, and timeouts."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, MODES, WATCHDOG_SECONDS, World, fresh_store, join, leaving_together

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="gloo notices nothing while it is idle")

WATCHDOG = timedelta(seconds=WATCHDOG_SECONDS)


def backend() -> dist.Backend:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def error_state() -> str:
    """The group's error state; that of no error if this torch does not have it."""
    return backend().get_error().name if hasattr(backend(), "get_error") else "SUCCESS"


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WATCHDOG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


# ---- losses ----


def idle_ranks_learn_of_a_death(rank: int, size: int, how: str) -> float:
    """Even ranks wait for a live rank, odd ones for nothing. Returns the seconds until the death was noticed."""
    victim = size - 1
    join(timeout=300)
    store = fresh_store()
    if rank == victim:
        store.wait([f"ready{r}" for r in range(victim)], WATCHDOG)
        child = os.fork() if how == "forked" else -1
        if child == 0:  # the child has inherited every connection, and lives on
            time.sleep(10 * WATCHDOG_SECONDS)
            os._exit(0)
        store.set("child", str(child))
        store.set("end", repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    pending = dist.irecv(torch.empty(3), src=(rank + 1) % victim) if rank % 2 == 0 and victim > 1 else None
    store.set(f"ready{rank}", "yes")
    with leaving_together(range(victim)):
        try:
            if pending is not None:
                until(pending.is_completed, "what is in flight ends")
            if hasattr(backend(), "get_error"):
                until(lambda: error_state() == "COMM_ERROR", f"rank {rank} learns of the loss")
            took = time.time() - float(store.get("end"))
            if pending is not None:
                with pytest.raises(dist.DistBackendError, match=rf"recv\(12 bytes(.|\n)*rank {victim} is lost"):
                    pending.wait()
            with pytest.raises(dist.DistBackendError, match=rf"barrier(.|\n)*rank {victim} is lost"):
                dist.barrier()
        finally:
            if rank == 0 and how == "forked":
                os.kill(int(store.get("child")), signal.SIGKILL)
    return took


def leaving_is_no_loss(rank: int, size: int) -> None:
    join(timeout=300)
    store = fresh_store()
    dist.barrier()
    if rank > 0:
        store.wait([f"left{rank - 1}"], WATCHDOG)
    time.sleep(0.2)  # time in which a loss would be noticed
    assert error_state() == "SUCCESS"
    tensor = torch.full((3,), float(rank))
    if rank == size - 2:  # the last two can still communicate
        dist.send(tensor, dst=rank + 1)
    elif rank == size - 1:
        dist.recv(tensor, src=rank - 1)
        assert tensor.tolist() == [float(rank - 1)] * 3
    dist.destroy_process_group()
    store.set(f"left{rank}", "yes")


@pytest.mark.worlds(sizes=(4,))
@pytest.mark.parametrize("how", ["sigkill", "forked"])
def test_idle_ranks_learn_of_a_death(fresh_world: World, how: str) -> None:
    took = fresh_world.run(idle_ranks_learn_of_a_death, how, join=False, dies={fresh_world.size - 1})
    print(f"known after {max(t for t in took if t is not None):.3f} s")


@pytest.mark.worlds(sizes=(9,), modes=("shm", "tcp"))
def test_idle_ranks_that_do_not_watch_a_rank_learn_of_its_death(fresh_world: World) -> None:
    """Of nine ranks, 0, 2, 5 and 7 monitor rank 8; the others get the notice before any timeout."""
    took = fresh_world.run(idle_ranks_learn_of_a_death, "sigkill", join=False, dies={8})
    assert [rank for rank, seconds in enumerate(took) if seconds is None] == [8]
    print(f"known after {max(seconds for seconds in took if seconds is not None):.3f} s")


def all_groups_learn_of_a_death(rank: int, size: int) -> None:
    """The groups of two processes share the connections that tell of a death. One that has ended takes none away."""
    victim = size - 1
    join(timeout=300)
    store = fresh_store()
    groups = [dist.new_group(backend=BACKEND) for _ in range(4)]
    for group in groups[:2]:
        dist.barrier(group)
        dist.destroy_process_group(group)
    if rank == victim:
        store.wait([f"ready{r}" for r in range(victim)], WATCHDOG)
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"ready{rank}", "yes")
    with leaving_together(range(victim)):
        for group in [dist.group.WORLD, *groups[2:]]:
            backend = group._get_backend(torch.device("cpu"))
            if hasattr(backend, "get_error"):
                until(lambda: backend.get_error().name == "COMM_ERROR", "every group learns of the loss")  # noqa: B023
            with pytest.raises(dist.DistBackendError, match=rf"barrier(.|\n)*rank {victim} is lost"):
                dist.barrier(group)


@pytest.mark.worlds(sizes=(3,), modes=("shm", "tcp"))
def test_all_groups_learn_of_a_death(fresh_world: World) -> None:
    fresh_world.run(all_groups_learn_of_a_death, join=False, dies={fresh_world.size - 1})


@pytest.mark.worlds(sizes=(4,))
def test_leaving_is_no_loss(fresh_world: World) -> None:
    fresh_world.run(leaving_is_no_loss, join=False)


# ---- forks ----


def in_a_child(check: Callable[[], None]) -> None:
    """Runs `check` in a forked child, which must succeed."""
    child = os.fork()
    if child == 0:
        try:
            check()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
            os._exit(1)
    ended = threading.Thread(target=lambda: codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    codes: list[int] = []
    ended.start()
    ended.join(WATCHDOG_SECONDS / 2)
    if ended.is_alive():
        os.kill(child, signal.SIGKILL)
        ended.join()
    assert codes == [0]


def test_children_leave_their_parents_memory_alone() -> None:
    tensors = [ncclx_rs.get_mem_allocator("ncclx").empty(1000).fill_(7) for _ in range(2)]

    def drops() -> None:
        assert all((tensor == 7).all() for tensor in tensors)
        tensors.clear()
        assert (ncclx_rs.get_mem_allocator("ncclx").empty(1000) == 0).all()

    in_a_child(drops)
    assert all((tensor == 7).all() for tensor in tensors)


def test_children_leave_their_parents_windows_alone() -> None:
    comm = ncclx_rs.new_comm("ncclx", "cpu", store=dist.HashStore(), rank=0, size=1)
    part = torch.zeros(4)
    window = comm.new_window(part)

    def calls() -> None:
        for call in (
            window.fence,
            window.flush_all,
            lambda: window.get_attr(0),
            lambda: comm.new_window(torch.ones(1)),
            window.tensor_deregister,
        ):
            with pytest.raises(RuntimeError, match="before the fork"):
                call()

    # A thread of the parent goes on with what others may want of the window, and so has the engine's lock now and then.
    for _ in range(20):
        in_a_child(calls)
    window.put(torch.ones(4), 0, False)
    assert part.tolist() == [1, 1, 1, 1]
    window.tensor_deregister()
    comm.finalize()


def test_children_that_exit_leave_their_parents_memory_alone() -> None:
    code = """
        import os, ncclx_rs

        def main():
            tensor = ncclx_rs.get_mem_allocator("ncclx").empty(1000).fill_(7)
            child = os.fork()
            if child:
                assert os.waitpid(child, 0)[1] == 0
                assert (tensor == 7).all(), "the child has taken the memory"

        main()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(command, timeout=WATCHDOG_SECONDS, check=True)


def descriptors_of_nothing() -> int:
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{descriptor}") == "/dev/null"
        except OSError:
            continue  # the folder's own
    return count


def children_do_not_disturb(rank: int, size: int) -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    work = dist.irecv(tensor, src=(rank + 1) % size, tag=5)
    assert work is not None
    before = descriptors_of_nothing()

    def child() -> None:
        assert descriptors_of_nothing() >= before + 6, "connections and event polls are not inherited"
        for call in (lambda: dist.all_reduce(torch.ones(3)), work.wait):
            with pytest.raises(dist.DistBackendError, match="before the fork"):
                call()
        dist.destroy_process_group()

    def leaves() -> None:
        atexit._run_exitfuncs()

    def begins_anew() -> None:
        dist.destroy_process_group()
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
        works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        until(lambda: all(work.is_completed() for work in works), "works in a group of the child's own end")
        dist.destroy_process_group()

    for check in (child, leaves, begins_anew):
        in_a_child(check)
        dist.barrier()
    assert error_state() == "SUCCESS"
    dist.send(torch.full((3,), float(rank)), dst=(rank - 1) % size, tag=5)
    work.wait()
    assert tensor.tolist() == [float((rank + 1) % size)] * 3


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("mode", MODES)
def test_children_do_not_disturb(mode: str) -> None:
    world = World(2, mode)
    try:
        world.run(children_do_not_disturb)
    finally:
        world.close()


# ---- ends ----


def abort_is_quick(rank: int, size: int) -> float:
    """Aborts while threads are blocked in calls of several kinds. Returns the seconds until the last has ended."""
    join(timeout=300)
    store = fresh_store()
    dist.barrier()
    with leaving_together():
        if rank == 0:
            store.wait(["aborted"], WATCHDOG)
            return 0.0
        tensor = torch.ones(3)
        calls = [
            lambda: dist.all_reduce(tensor.clone()),
            lambda: dist.recv(tensor.clone(), src=0),
            lambda: dist.all_reduce(tensor.clone(), async_op=True).wait(),
            lambda: dist.send(torch.ones(1_000_000), dst=0),
        ]
        ends: list[tuple[float, str]] = []

        def blocked(call: Callable[[], object]) -> None:
            with pytest.raises(dist.DistBackendError) as raised:
                call()
            ends.append((time.monotonic(), str(raised.value)))

        threads = [threading.Thread(target=blocked, args=(call,), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        time.sleep(0.3)  # they block
        assert not ends
        began = time.monotonic()
        backend().abort()
        for thread in threads:
            thread.join(WATCHDOG_SECONDS)
        store.set("aborted", "yes")
        assert len(ends) == len(calls) and all("abort" in text for _, text in ends), ends
        return max(end for end, _ in ends) - began


@pytest.mark.worlds(sizes=(2,), modes=("shm", "tcp"))
def test_abort_is_quick(fresh_world: World) -> None:
    took = fresh_world.run(abort_is_quick, join=False)
    print(f"all ended after {1000 * max(took):.1f} ms")


def run_ranks(script: str, size: int, folder: Path, **variables: str) -> list[tuple[int, str]]:
    """Runs a script as each rank, to its exit; returns the exit code and output of each."""
    (folder / "script.py").write_text(textwrap.dedent(script))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(folder / "script.py"), str(rank), str(size), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | variables,
        )
        for rank in range(size)
    ]
    try:
        return [
            (rank.returncode, output) for rank in ranks for output in [rank.communicate(timeout=WATCHDOG_SECONDS)[0]]
        ]
    finally:
        for rank in ranks:
            rank.kill()


JOIN = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_end_without_a_word_in_any_order(tmp_path: Path, transport: str) -> None:
    script = JOIN + textwrap.dedent("""
    dist.init_process_group("ncclx_rs", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    dist.barrier()
    pending = dist.irecv(torch.empty(3), src=0, tag=3) if rank == 2 else None
    tensor = torch.full((100_000,), float(rank))
    dist.broadcast(tensor, src=0)
    assert tensor[-1].item() == 0.0
    time.sleep(0.2 * ((rank + 1) % size))
    """)
    for code, output in run_ranks(script, 3, tmp_path, NCCLX_RS_TRANSPORT=transport):
        assert code == 0, output


# Exits with a message in flight that has a callback in Python, in a group that Python may not know.
IN_FLIGHT = """
dist.init_process_group("ncclx_rs", init_method=f"file://{folder}/store", rank=rank, world_size=size)
group = dist.group.WORLD
if sys.argv[4:] == ["split"]:
    try:
        group = dist.split_group(split_ranks=[list(range(size))])
    except RuntimeError as error:
        sys.exit(f"cannot split: {error}")
tensor = torch.empty(3)
if rank == 0:
    work = dist.irecv(tensor, group=group, group_src=1)
    work.get_future().add_done_callback(lambda future: print("called", flush=True))
    del work
    dist.barrier()
else:
    dist.barrier()
    time.sleep(0.2)
del group
"""


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["whole", "split"])
def test_an_operation_in_flight_ends_with_the_interpreter(tmp_path: Path, kind: str) -> None:
    script = JOIN + (f"sys.argv.append({kind!r})\n") + IN_FLIGHT
    for rank, (code, output) in enumerate(run_ranks(script, 2, tmp_path)):
        if kind == "split" and "cannot split: No device associated" in output:
            pytest.skip("this torch splits only groups that are bound to an accelerator")
        assert code == 0 and output.count("called") == (rank == 0), output


def test_an_idle_process_ends_after_its_hooks_and_the_dump(tmp_path: Path) -> None:
    script = JOIN + textwrap.dedent("""
    import ncclx_rs
    store = dist.FileStore(f"{folder}/store", size)
    comm = ncclx_rs.new_comm("ncclx", "cpu", "idle", store=store, rank=rank, size=size)
    dumped = lambda: [name for name in os.listdir(f"{folder}/dumps") if "idle" in name]
    comm.register_abort_hook(lambda: print(f"the hook finds {dumped()}", flush=True))  # in one write
    comm.barrier(False)
    if rank == 1:
        store.get("idle")
        os._exit(0)
    store.set("idle", "yes")
    time.sleep(600)
    """)
    (tmp_path / "dumps").mkdir()
    (code, output), _ = run_ranks(script, 2, tmp_path, NCCLX_RS_DUMP_DIRECTORY=str(tmp_path / "dumps"))
    assert code == -signal.SIGABRT, output
    assert re.search(r"the hook finds \['.*idle.*'\](.|\n)*Aborting process", output), output


# PyO3 turns this exception into a panic, here when the recorder captures the stack of an operation in flight.
PANIC = """
import sys
import ncclx_rs, torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

comm = ncclx_rs.new_comm("ncclx", "cpu", store=dist.HashStore(), rank=0, size=1, hints={"stack_frames": "4"})
(panic,) = [kind for kind in BaseException.__subclasses__() if kind.__name__ == "PanicException"]


def fall_over(depth=0):
    raise panic("the stack fell over")


sys._getframe = fall_over
try:
    comm.get_backend_impl().c10d.broadcast([torch.ones(3)], c10d.BroadcastOptions())
finally:
    print("it goes on")
"""


def test_a_panic_with_an_operation_under_way_ends_the_process(tmp_path: Path) -> None:
    ((code, output),) = run_ranks(PANIC, 1, tmp_path)
    assert code == -signal.SIGABRT and "it goes on" not in output, output
    assert "ncclx_rs: internal error: the stack fell over; the process ends" in output, output


# ---- time limits ----


LIMIT = 2.0


def limit_is_kept(rank: int, size: int, kind: str, waits: bool) -> float:
    """An operation whose peer is late ends in time, also without a waiting thread. Returns the seconds it was late."""
    hints = {"timeout_seconds": str(LIMIT)} if kind == "hint" else {}
    if kind == "variable":
        os.environ["NCCLX_RS_TIMEOUT_SECONDS"] = str(LIMIT)
    try:
        comm = ncclx_rs.new_comm(
            "ncclx",
            "cpu",
            store=fresh_store(),
            rank=rank,
            size=size,
            hints=hints,
            abort_process_on_timeout_or_error=False,
        )
    finally:
        os.environ.pop("NCCLX_RS_TIMEOUT_SECONDS", None)
    comm.barrier(False, timeout=WATCHDOG)
    with leaving_together():
        if rank == 0:
            limit = timedelta(seconds=LIMIT) if kind == "operation" else None
            began = time.monotonic()
            work = comm.all_reduce(torch.ones(5), ncclx_rs.ReduceOp.SUM, True, timeout=limit)
            if not waits:
                until(work.is_completed, "a work that nobody waits for ends")
            else:
                with pytest.raises(RuntimeError):
                    work.wait()
            took = time.monotonic() - began
            assert took >= LIMIT - 0.01, f"ended after {took} s"
            assert re.search(
                r"all_reduce\(SUM, 5 × float32\) timed out after a timeout of [\d.]+m?s: collective 1: "
                r"rank\(s\) 1 did not call it; rank\(s\) 0 did",
                str(work.exception()),
            ), work.exception()
    comm.finalize()
    return took - LIMIT if rank == 0 else 0.0


def groups_take_the_variable(rank: int, size: int) -> None:
    os.environ["NCCLX_RS_TIMEOUT_SECONDS"] = str(LIMIT)
    try:
        dist.init_process_group(BACKEND, store=fresh_store(), rank=rank, world_size=size)
    finally:
        os.environ.pop("NCCLX_RS_TIMEOUT_SECONDS")
    with leaving_together():
        if rank == 0:
            with pytest.raises(dist.DistBackendError, match="timed out"):
                dist.barrier()


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", ["operation", "hint", "variable"])
def test_limit_is_kept(world: World, kind: str, waits: bool) -> None:
    late, _ = world.run(limit_is_kept, kind, waits, join=False)
    print(f"{1000 * late:.1f} ms late")


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_groups_take_the_variable(world: World) -> None:
    world.run(groups_take_the_variable, join=False)
