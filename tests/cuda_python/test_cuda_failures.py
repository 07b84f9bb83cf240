"""What goes wrong with operations on CUDA tensors: every rank is told why, and no stream waits for ever."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import World, fresh_store, joined


def warm() -> None:
    """The first operation on a device blocks until all ranks have called it."""
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()


def disagreements(rank: int, size: int) -> None:
    warm()
    for is_async in (False, True):
        tensor = torch.ones(10, device="cuda")
        op = dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM
        with pytest.raises(RuntimeError, match=r"all_reduce\(MAX, 10 × float32\)") as caught:
            work = dist.all_reduce(tensor, op, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=30))
        assert "all_reduce(SUM, 10" in str(caught.value)
        # The stream runs out, and the group goes on.
        torch.cuda.synchronize()
        again = torch.full((3,), float(rank), device="cuda")
        work = dist.all_reduce(again, async_op=is_async)
        if work is not None:
            work.wait()
        assert again.cpu().tolist() == [sum(range(size))] * 3


def test_ranks_that_disagree_are_told_and_the_group_goes_on(cuda_world: World) -> None:
    cuda_world.run(disagreements)


def a_rank_that_does_not_come(rank: int, size: int) -> None:
    store = fresh_store()
    with joined(timeout=2):
        warm()
        last = size - 1
        if rank != last:
            begin = time.monotonic()
            work = dist.all_reduce(torch.ones(10, device="cuda"), async_op=True)
            absent = rf"rank\(s\) {last} did not call it; .* ago rank\(s\) {last} had no operation in flight"
            with pytest.raises(RuntimeError, match=absent):
                work.wait(timedelta(seconds=60))
            torch.cuda.synchronize()
            assert time.monotonic() - begin < 30, "the stream was not released"
            with pytest.raises(RuntimeError, match="did not call it"):
                dist.all_reduce(torch.ones(10, device="cuda"))
            store.set(f"failed{rank}", "yes")
        # The CPU's engine is not concerned. It says when all are here.
        store.wait([f"failed{rank}" for rank in range(last)])


def test_a_rank_that_does_not_come_is_named_and_the_stream_is_released(cuda_world: World) -> None:
    cuda_world.run(a_rank_that_does_not_come, join=False)


def a_block_without_the_other_rank(rank: int, size: int) -> None:
    store = fresh_store()
    with joined(timeout=2):
        warm()
        if rank == 0:
            here = torch.device("cuda", torch.cuda.current_device())
            with dist._coalescing_manager(device=here, async_ops=True) as manager:
                dist.all_reduce(torch.ones(10, device="cuda"))
            [work] = manager.works
            assert work.get_future_result().wait() == 1, "c10d's WorkResult.TIMEOUT"
            torch.cuda.synchronize()
            store.set("failed", "yes")
        store.wait(["failed"])


def test_a_block_tells_of_the_timeout_of_its_collective(cuda_world: World) -> None:
    if cuda_world.size != 2:
        pytest.skip("another rank that waits may give up first")
    cuda_world.run(a_block_without_the_other_rank, join=False)


def orders_differ(rank: int, size: int) -> None:
    store = fresh_store()
    with joined(timeout=2):
        # Its ranks are still there when rank 0 gives up.
        others = dist.new_group(timeout=timedelta(seconds=4))
        warm()
        dist.all_reduce(torch.zeros(1, device="cuda"), group=others)
        torch.cuda.synchronize()
        work = dist.all_reduce(torch.ones(10, device="cuda"), group=others if rank else None, async_op=True)
        with pytest.raises(RuntimeError, match="did not call it") as raised:
            work.wait(timedelta(seconds=60))
        if rank == 0:
            ranks = ", ".join(str(other) for other in range(1, size))
            call = r"all_reduce\(SUM, 10 × float32\) of communicator `\S+` on its device"
            assert re.search(rf"s ago rank\(s\) {ranks} had {call} in flight", str(raised.value)), raised.value
        store.set(f"failed{rank}", "yes")
        store.wait([f"failed{other}" for other in range(size)])


def test_a_timeout_says_which_operation_keeps_the_other_ranks(cuda_world: World) -> None:
    cuda_world.run(orders_differ, join=False)


def a_rank_that_aborts(rank: int, size: int) -> None:
    with joined():
        warm()
        if rank == 0:
            dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")).abort()
        else:
            # At the call, or at the wait if rank 0 leaves later.
            with pytest.raises(RuntimeError, match=r"all_reduce\(SUM, 10 .* rank 0 is lost"):
                dist.all_reduce(torch.ones(10, device="cuda"), async_op=True).wait(timedelta(seconds=60))
            torch.cuda.synchronize()


def test_a_rank_that_aborts_ends_what_waits_for_it(cuda_world: World) -> None:
    cuda_world.run(a_rank_that_aborts, join=False)


def refused(rank: int, size: int) -> None:
    warm()
    tensor = torch.ones(4, device="cuda")
    with pytest.raises(ValueError, match="supports, got BAND"):
        dist.all_reduce(tensor, dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match="all_gather: argument `output`"):
        dist.all_gather_into_tensor(torch.empty(4 * size + 1, device="cuda"), tensor)
    with pytest.raises(ValueError, match="cuda"):
        dist.all_gather_into_tensor(torch.empty(4 * size), tensor)
    dist.all_reduce(tensor)
    assert tensor.cpu().tolist() == [float(size)] * 4


def test_what_cannot_be_done_is_refused_and_the_group_goes_on(cuda_world: World) -> None:
    cuda_world.run(refused)
