"""One-sided windows: data is there after the signal, whatever the target does meanwhile."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from typing import Any

import ncclx_rs
import numpy
import pytest
import torch
import torch.distributed as dist
from harness import HOSTS, World, fresh_store, leaving_together, meet, stop
from ncclx_rs._load import native

pytestmark = pytest.mark.worlds(sizes=(1, 2, 3))

LARGE = 3_000_000


def backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def puts_go_round_a_ring(rank: int, size: int, dtype: torch.dtype, count: int, async_op: bool) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    memory = torch.full((count * size,), 99, dtype=dtype)
    window = backend()._window_register(memory)
    for turn in range(5):
        value = torch.full((count,), rank * 10 + turn, dtype=dtype)
        works = [
            backend()._window_put(window, value, after, rank * count * value.element_size(), async_op),
            backend()._window_signal(window, after, async_op),
            backend()._window_wait_signal(window, before, async_op),
        ]
        for work in works:
            work.wait()
        got = memory[before * count : (before + 1) * count]
        torch.testing.assert_close(got, torch.full_like(got, before * 10 + turn), rtol=0, atol=0)
        dist.barrier()  # the next put overwrites it
    backend()._window_deregister(window)


def tensors_live_as_long_as_they_are_needed(rank: int, size: int) -> None:
    after = (rank + 1) % size
    window = backend()._window_register(torch.zeros(LARGE))
    put = backend()._window_put(window, torch.full((LARGE,), float(rank)), after, 0, True)
    gc.collect()
    decoys = [torch.full((LARGE,), -1.0) for _ in range(3)]  # these tensors would take freed memory
    backend()._window_signal(window, after, True)
    backend()._window_wait_signal(window, (rank - 1) % size)
    put.wait()
    got = torch.empty(LARGE)
    backend()._window_get(window, got, rank, 0)
    assert torch.equal(got, torch.full((LARGE,), float((rank - 1) % size)))
    del decoys
    backend()._window_deregister(window)


def get_reads_another_ranks_window(rank: int, size: int) -> None:
    memory = torch.arange(LARGE, dtype=torch.int32) * (rank + 1)
    window = backend()._window_register(memory)
    for source in range(size):
        got = torch.empty(LARGE - 5, dtype=torch.int32)
        work = backend()._window_get(window, got, source, 20, True)
        work.wait()
        assert torch.equal(got, torch.arange(5, LARGE, dtype=torch.int32) * (source + 1))
        strided = torch.zeros(4, 2, dtype=torch.int32)
        backend()._window_get(window, strided.t(), source, 0)
        assert torch.equal(strided.t().flatten(), torch.arange(8, dtype=torch.int32) * (source + 1))
    backend()._window_deregister(window)


def mistakes_are_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        backend()._window_register(torch.zeros(4, 4).t())
    window = backend()._window_register(torch.zeros(4))
    with pytest.raises(ValueError, match=r"Requested size \(20 bytes\) exceeds the window size \(16 bytes\)"):
        backend()._window_put(window, torch.zeros(2), (rank + 1) % size, 12)
    with pytest.raises(ValueError, match="dst"):
        backend()._window_signal(window, size)
    with pytest.raises(ValueError, match="offset"):
        backend()._window_put(window, torch.zeros(2), 0, -4)
    with pytest.raises(ValueError, match="registered window"):
        backend()._window_signal(window + 1, 0)
    backend()._window_deregister(window)
    with pytest.raises(ValueError, match="registered window"):
        backend()._window_deregister(window)
    dist.barrier()


def a_signal_nobody_sends_is_named_in_the_timeout(rank: int, size: int) -> None:
    window = backend()._window_register(torch.zeros(1))
    for async_op in (False, True):
        with pytest.raises(dist.DistBackendError, match=rf"wait_signal.*rank {size - 1} did not signal"):
            backend()._window_wait_signal(window, size - 1, async_op, 100).wait()
    backend()._window_deregister(window)


def waiting_for_a_signal_leaves_python_to_others(rank: int, size: int) -> None:
    window = backend()._window_register(torch.zeros(1))

    def send() -> None:
        time.sleep(0.1)
        backend()._window_signal(window, rank)

    sender = threading.Thread(target=send)
    sender.start()
    backend()._window_wait_signal(window, rank, timeout_ms=600_000)  # a rank that misses the signal hangs
    sender.join()
    backend()._window_deregister(window)


def who_waits_for_a_dead_rank_is_told(rank: int, size: int) -> None:
    window = backend()._window_register(torch.zeros(1))
    waits = backend()._window_wait_signal(window, 1, True) if rank == 0 else None
    meet()
    if rank == 1:
        os._exit(9)
    if waits is not None:
        with pytest.raises(dist.DistBackendError, match=r"wait_signal\(from rank 1, window 0\): rank 1 is lost"):
            waits.wait()
        with pytest.raises(dist.DistBackendError, match=r"wait_signal(\(from rank 1, window 0\))?: rank 1 is lost"):
            backend()._window_wait_signal(window, 1)


def a_put_that_fails_takes_the_signal_after_it(rank: int, size: int) -> None:
    window = backend()._window_register(torch.zeros(10 * LARGE))
    processes: list[Any] = [None] * size
    dist.all_gather_object(processes, os.getpid())
    if rank == 0:
        stop(processes[1])
        try:
            put = backend()._window_put(window, torch.ones(10 * LARGE), 1, 0, True, 300)
            signalled = backend()._window_signal(window, 1, True, 60_000)
            with pytest.raises(dist.DistBackendError, match="rank 1 did not take it"):
                put.wait()
            with pytest.raises(dist.DistBackendError, match="a put to rank 1 before it failed"):
                signalled.wait()
        finally:
            os.kill(processes[1], signal.SIGCONT)
    dist.barrier()
    if rank == 1:
        with pytest.raises(dist.DistBackendError, match="rank 0 did not signal"):
            backend()._window_wait_signal(window, 0, False, 200)
    backend()._window_deregister(window)


def mapped_parts_need_no_target(rank: int, size: int) -> None:
    memory = native()._shared_memory(4 * LARGE).view(torch.float32)
    window = backend()._window_register(memory)
    processes: list[Any] = [None] * size
    dist.all_gather_object(processes, os.getpid())
    if rank == 0:
        stop(processes[1])
        try:
            backend()._window_put(window, torch.full((LARGE,), 3.0), 1, 0, timeout_ms=5000)
            got = torch.empty(LARGE)
            backend()._window_get(window, got, 1, 0, timeout_ms=5000)
            assert torch.equal(got, torch.full((LARGE,), 3.0))
        finally:
            os.kill(processes[1], signal.SIGCONT)
    dist.barrier()
    if rank == 1:
        assert torch.equal(memory, torch.full((LARGE,), 3.0))
    backend()._window_deregister(window)


def pytorchs_window_is_one_of_ours(rank: int, size: int) -> None:
    group = dist.group.WORLD
    if not hasattr(group, "new_window"):
        pytest.skip("this PyTorch has no windows")
    assert group.supports_window
    after, before, count = (rank + 1) % size, (rank - 1) % size, 1000
    memory = torch.full((count * size,), 99.0)
    for window, owning in ((group.new_window(memory), True), (group.new_window(), False)):
        if not owning:
            with pytest.raises(RuntimeError, match="no tensor"):
                window.signal(rank, False)
            window.tensor_register(memory, False)
        with pytest.raises(RuntimeError, match="Double registration error"):
            window.tensor_register(memory)
        for async_op in (False, True):
            dist.barrier()
            value = torch.full((count,), float(rank))
            window.put(value, after, rank * count, async_op).wait()
            window.signal(after, async_op).wait()
            window.wait_signal(before, async_op).wait()
            local = window.map_remote_tensor(rank)
            assert local.data_ptr() == memory.data_ptr()
            assert torch.equal(local[before * count : (before + 1) * count], torch.full((count,), float(before)))
        with pytest.raises(ValueError, match="exceeds the window size"):
            window.put(value, after, count * size, False)
        for access, arguments, wrong in (  # numbers that would be good ones of fewer bits
            (window.put, (value, after + 2**32, 0), "`dst`"),
            (window.put, (value, after, 2**62), "`offset`"),
            (window.signal, (after - 2**32,), "`dst`"),
            (window.wait_signal, (before + 2**32,), "`src`"),
        ):
            with pytest.raises(ValueError, match=wrong):
                access(*arguments, False)
        mine = window.get_attr(rank).access_type
        if size > 1:
            assert window.get_attr(after).access_type != mine
            with pytest.raises(ValueError, match="whose part lies in shared memory|on the same host"):
                window.map_remote_tensor(after)
        window.tensor_deregister()
        with pytest.raises(RuntimeError, match="Double deregistration"):
            window.tensor_deregister()
    mapped = group.new_window(native()._shared_memory(40).view(torch.float32).fill_(rank))
    dist.barrier()
    if "NCCLX_RS_HOST_ID" in os.environ and HOSTS[size][after] != HOSTS[size][rank]:
        with pytest.raises(ValueError, match="on the same host"):
            mapped.map_remote_tensor(after)
        assert mapped.get_attr(after).access_type != mine
    else:
        assert torch.equal(mapped.map_remote_tensor(after), torch.full((10,), float(after)))
        assert mapped.get_attr(after).access_type == mine
    mapped.tensor_deregister()


def a_windows_tensor_outlives_the_other_ranks_access(rank: int, size: int) -> None:
    comm = ncclx_rs.new_comm(
        "ncclx", "cpu", store=fresh_store(), rank=rank, size=size, abort_process_on_timeout_or_error=False
    )
    store = fresh_store()
    backend = comm.get_backend_impl().c10d
    array = numpy.zeros(4, dtype=numpy.float32)
    window = backend._window_register(torch.from_numpy(array))
    with leaving_together():
        if rank == 0:

            def dropped() -> None:
                store.set("dropped", "")
                store.wait(["tried"])

            weakref.finalize(array, dropped)
            del array, comm, backend
            gc.collect()
            assert store.check(["tried"])
        else:
            store.wait(["dropped"])
            try:
                with pytest.raises(RuntimeError, match="rank 0"):
                    backend._window_put(window, torch.ones(4), 0, 0)
                    backend._window_flush(window, 0)
            finally:
                store.set("tried", "")


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("dtype", "count"), [(torch.int8, 1 << 20), (torch.bfloat16, 4), (torch.float64, 1000)])
def test_puts_go_round_a_ring(world: World, dtype: torch.dtype, count: int, async_op: bool) -> None:
    world.run(puts_go_round_a_ring, dtype, count, async_op)


def test_tensors_live_as_long_as_they_are_needed(world: World) -> None:
    world.run(tensors_live_as_long_as_they_are_needed)


def test_get_reads_another_ranks_window(world: World) -> None:
    world.run(get_reads_another_ranks_window)


def test_mistakes_are_refused(world: World) -> None:
    world.run(mistakes_are_refused)


def test_a_signal_nobody_sends_is_named_in_the_timeout(world: World) -> None:
    world.run(a_signal_nobody_sends_is_named_in_the_timeout)


def test_waiting_for_a_signal_leaves_python_to_others(world: World) -> None:
    world.run(waiting_for_a_signal_leaves_python_to_others)


@pytest.mark.worlds(sizes=(2,))
def test_a_windows_tensor_outlives_the_other_ranks_access(fresh_world: World) -> None:
    fresh_world.run(a_windows_tensor_outlives_the_other_ranks_access, join=False)


@pytest.mark.worlds(sizes=(2, 3))
def test_a_rank_that_waits_for_a_dead_rank_is_told(fresh_world: World) -> None:
    fresh_world.run(who_waits_for_a_dead_rank_is_told, dies=[1])


@pytest.mark.worlds(sizes=(2,))
def test_a_put_that_fails_takes_the_signal_after_it(fresh_world: World) -> None:
    fresh_world.run(a_put_that_fails_takes_the_signal_after_it)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_mapped_parts_need_no_target(fresh_world: World) -> None:
    fresh_world.run(mapped_parts_need_no_target)


def test_pytorchs_window_is_one_of_ours(world: World) -> None:
    world.run(pytorchs_window_is_one_of_ours)
