"""The coalescing manager: one Work for many operations, which covers all of them."""

from __future__ import annotations

import time
import weakref

import pytest
import torch
import torch.distributed as dist
from harness import WATCHDOG_SECONDS, World, join, leaving_together
from reference import assert_same, data, reduced
from test_peer_loss import until
from torch.distributed.distributed_c10d import _coalescing_manager

CPU = torch.device("cpu")
# Sizes far apart: if the Work ended with the first operation, the last would not be reduced yet.
COUNTS = (1, 500_000, 0, 3, 200_000)


def _assert_reduced(tensors: list[torch.Tensor], size: int, what: str) -> None:
    for i, tensor in enumerate(tensors):
        expected = reduced([data(r, COUNTS[i], salt=i) for r in range(size)])
        assert_same(tensor, expected, f"{what}, tensor {i}")


def all_reduces_coalesce(rank: int, size: int, device: torch.device | None, async_ops: bool) -> None:
    for _ in range(3):
        tensors = [data(rank, count, salt=i) for i, count in enumerate(COUNTS)]
        with _coalescing_manager(device=device, async_ops=async_ops) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if async_ops:
            manager.wait()
        _assert_reduced(tensors, size, f"device={device}")


def gathers_and_scatters_coalesce(rank: int, size: int, device: torch.device | None, async_ops: bool) -> None:
    counts = (1, 100_000, 7)
    gathered = [torch.full((size * count,), 99.0) for count in counts]
    with _coalescing_manager(device=device, async_ops=async_ops) as manager:
        for i, output in enumerate(gathered):
            dist.all_gather_into_tensor(output, data(rank, counts[i], salt=i))
    if async_ops:
        manager.wait()
    for i, output in enumerate(gathered):
        assert_same(output, torch.cat([data(r, counts[i], salt=i) for r in range(size)]), f"all_gather {i}")
    parts = [torch.full((count,), 99.0) for count in counts]
    with _coalescing_manager(device=device, async_ops=async_ops) as manager:
        for i, part in enumerate(parts):
            dist.reduce_scatter_tensor(part, data(rank, size * counts[i], salt=i))
    if async_ops:
        manager.wait()
    for i, part in enumerate(parts):
        total = reduced([data(r, size * counts[i], salt=i) for r in range(size)])
        assert_same(part, total[rank * counts[i] : (rank + 1) * counts[i]], f"reduce_scatter {i}")


def different_operations_coalesce(rank: int, size: int) -> None:
    total, copied = data(rank, 100_000), data(rank, 1000)
    gathered = [torch.empty(10) for _ in range(size)]
    with _coalescing_manager(device=CPU, async_ops=True) as manager:
        dist.all_reduce(total)
        dist.broadcast(copied, src=size - 1)
        dist.all_gather(gathered, data(rank, 10))
    manager.wait()
    assert_same(total, reduced([data(r, 100_000) for r in range(size)]), "all_reduce")
    assert_same(copied, data(size - 1, 1000), "broadcast")
    assert_same(torch.cat(gathered), torch.cat([data(r, 10) for r in range(size)]), "all_gather")


def nothing_coalesces(rank: int, size: int) -> None:
    with _coalescing_manager(device=CPU):
        pass
    with _coalescing_manager():
        pass
    dist.barrier()


def coalesced_lists_reduce(rank: int, size: int) -> None:
    tensors = [data(rank, count, salt=i) for i, count in enumerate(COUNTS)]
    dist.all_reduce_coalesced(tensors)
    _assert_reduced(tensors, size, "all_reduce_coalesced")


def an_exception_leaves_nothing_behind(rank: int, size: int) -> None:
    def broken_off() -> None:
        with _coalescing_manager(device=CPU):
            dist.broadcast(torch.ones(3), src=0)
            raise KeyError("the program's own")

    def lent() -> weakref.ref[torch.Tensor]:
        tensor = data(rank, 1000)
        dist.broadcast(tensor, src=size - 1)
        assert_same(tensor, data(size - 1, 1000), "broadcast after the exception")
        return weakref.ref(tensor)

    with pytest.raises(KeyError):
        broken_off()
    kept = [lent() for _ in range(20)]
    deadline = time.monotonic() + WATCHDOG_SECONDS  # the thread that ends an operation drops it a little later
    while any(tensor() is not None for tensor in kept):
        assert time.monotonic() < deadline, "tensors are kept"
        time.sleep(0.005)
    different_operations_coalesce(rank, size)


def a_refused_call_ends_its_block(rank: int, size: int) -> None:
    group = dist.group.WORLD
    group._start_coalescing(CPU)
    dist.broadcast(torch.ones(3), src=0)
    with pytest.raises(ValueError, match="expanded"):
        dist.all_reduce(torch.ones(1).expand(3))
    total = torch.ones(3)
    work = group.allreduce([total])
    with pytest.raises(ValueError, match="the block has ended already, by the error of one of its calls"):
        group._end_coalescing(CPU)
    work.wait()
    assert total.tolist() == [float(size)] * 3
    different_operations_coalesce(rank, size)


def a_block_tells_of_a_timeout_as_its_message_does(rank: int, size: int) -> None:
    join(timeout=1)
    with leaving_together():
        if rank != 0:
            return
        alone = dist.irecv(torch.empty(3), 1)
        with _coalescing_manager(device=CPU, async_ops=True) as manager:
            dist.irecv(torch.empty(3), 1)
        with _coalescing_manager(device=CPU, async_ops=True) as late:
            member = dist.irecv(torch.empty(3), 1)
            until(member.is_completed, "the limit is over before the block is")
        timeout = 1  # c10d's WorkResult.TIMEOUT
        assert [work.get_future_result().wait() for work in (alone, *manager.works, *late.works)] == [timeout] * 3


@pytest.mark.parametrize("async_ops", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("device", [None, CPU], ids=["without_device", "with_device"])
@pytest.mark.parametrize("check", [all_reduces_coalesce, gathers_and_scatters_coalesce], ids=lambda c: c.__name__)
def test_one_kind_coalesces(world: World, check, device, async_ops) -> None:
    world.run(check, device, async_ops)


@pytest.mark.parametrize(
    "check",
    [
        different_operations_coalesce,
        nothing_coalesces,
        coalesced_lists_reduce,
        an_exception_leaves_nothing_behind,
        a_refused_call_ends_its_block,
    ],
    ids=lambda c: c.__name__,
)
def test_coalescing(world: World, check) -> None:
    world.run(check)


@pytest.mark.worlds(sizes=(2,), modes=("shm",))
def test_a_block_tells_of_a_timeout_as_its_message_does(fresh_world: World) -> None:
    fresh_world.run(a_block_tells_of_a_timeout_as_its_message_does, join=False)
