"""Every collective on CUDA tensors, blocking and asynchronous, against what each rank computes alone on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World
from reference import assert_same, data, reduced

COUNTS = (0, 1, 1023, 70_001)


def there(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on this rank's device."""
    return tensor.cuda()


def call(operation: Callable[..., Any], *args: Any, is_async: bool, **kwargs: Any) -> None:
    work = operation(*args, async_op=is_async, **kwargs)
    if is_async:
        work.wait()


def everything(rank: int, size: int, is_async: bool) -> None:
    one_for_all(rank, size, is_async)
    each_for_each(rank, size, is_async)


def one_for_all(rank: int, size: int, is_async: bool) -> None:
    """Every collective but all_to_all."""

    def run(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        call(operation, *args, is_async=is_async, **kwargs)

    for count in COUNTS:
        parts = [data(r, count) for r in range(size)]
        for op in ("SUM", "AVG", "MAX"):
            tensor = there(parts[rank])
            run(dist.all_reduce, tensor, op=getattr(dist.ReduceOp, op))
            assert_same(tensor.cpu(), reduced(parts, op), f"all_reduce {op} of {count}")
        for root in range(size):
            tensor = there(parts[rank])
            run(dist.broadcast, tensor, src=root)
            assert_same(tensor.cpu(), parts[root], f"broadcast of {count} from {root}")
            tensor = there(parts[rank])
            run(dist.reduce, tensor, dst=root)
            if rank == root:
                assert_same(tensor.cpu(), reduced(parts), f"reduce of {count} to {root}")
            lists = [there(torch.zeros(count)) for _ in range(size)] if rank == root else None
            run(dist.gather, there(parts[rank]), lists, dst=root)
            for r, got in enumerate(lists or ()):
                assert_same(got.cpu(), parts[r], f"gather of {count} to {root}, slot {r}")
            output = there(torch.zeros(count))
            run(dist.scatter, output, [there(part) for part in parts] if rank == root else None, src=root)
            assert_same(output.cpu(), parts[rank], f"scatter of {count} from {root}")
        outputs = [there(torch.zeros(count)) for _ in range(size)]
        run(dist.all_gather, outputs, there(parts[rank]))
        for r, got in enumerate(outputs):
            assert_same(got.cpu(), parts[r], f"all_gather of {count}, slot {r}")
        output = there(torch.zeros(size * count))
        run(dist.all_gather_into_tensor, output, there(parts[rank]))
        assert_same(output.cpu(), torch.cat(parts), f"all_gather_into_tensor of {count}")
        blocks = [[data(r, count, salt=b) for b in range(size)] for r in range(size)]
        expected = reduced([blocks[r][rank] for r in range(size)])
        output = there(torch.zeros(count))
        run(dist.reduce_scatter, output, [there(block) for block in blocks[rank]])
        assert_same(output.cpu(), expected, f"reduce_scatter of {count}")
        output = there(torch.zeros(count))
        run(dist.reduce_scatter_tensor, output, there(torch.cat(blocks[rank])))
        assert_same(output.cpu(), expected, f"reduce_scatter_tensor of {count}")


def each_for_each(rank: int, size: int, is_async: bool) -> None:
    def run(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        call(operation, *args, is_async=is_async, **kwargs)

    for count in COUNTS:
        sent = [data(rank, count * (peer % 2) + rank, salt=peer) for peer in range(size)]
        expected = torch.cat([data(r, count * (rank % 2) + r, salt=rank) for r in range(size)])
        splits = [[count * (rank % 2) + r for r in range(size)], [part.numel() for part in sent]]
        output = there(torch.zeros(sum(splits[0])))
        run(dist.all_to_all_single, output, there(torch.cat(sent)), *splits)
        assert_same(output.cpu(), expected, f"all_to_all_single of {count} to odd ranks")
        outputs = [there(torch.zeros(length)) for length in splits[0]]
        run(dist.all_to_all, outputs, [there(part) for part in sent])
        assert_same(torch.cat(outputs).cpu(), expected, f"all_to_all of {count} to odd ranks")


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_every_collective_is_right(cuda_world: World, is_async: bool) -> None:
    cuda_world.run(everything, is_async)


def any_layout(rank: int, size: int, is_async: bool) -> None:
    parts = [data(r, (6, 10)) for r in range(size)]
    whole = there(torch.full((6, 20), 99.0))
    tensor = whole[:, ::2]
    tensor.copy_(parts[rank])
    call(dist.all_reduce, tensor, is_async=is_async)
    assert_same(tensor.cpu().contiguous(), reduced(parts), "all_reduce of every second column")
    assert_same(whole[:, 1::2].cpu().contiguous(), torch.full((6, 10), 99.0), "the columns between")
    outputs = [there(torch.zeros(10, 6)).t() for _ in range(size)]
    call(dist.all_gather, outputs, there(parts[rank].t().contiguous()).t(), is_async=is_async)
    for r, got in enumerate(outputs):
        assert_same(got.cpu().contiguous(), parts[r], f"all_gather of transposed tensors, slot {r}")
    # An output that is an input too: to the program, all inputs are read before anything is written.
    shared = there(torch.cat(parts))
    call(dist.reduce_scatter_tensor, shared[:6], shared, is_async=is_async)
    assert_same(shared[:6].cpu(), size * parts[rank], "reduce_scatter_tensor into its own input")


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_tensors_may_have_any_strides_and_overlap(cuda_world: World, is_async: bool) -> None:
    cuda_world.run(any_layout, is_async)


def coalesced(rank: int, size: int, is_async: bool) -> None:
    parts = [[data(r, 1000 + i, salt=i) for i in range(4)] for r in range(size)]
    tensors = [there(part) for part in parts[rank]]
    with dist._coalescing_manager(device=tensors[0].device, async_ops=is_async) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if is_async:
        manager.wait()
    for i, tensor in enumerate(tensors):
        assert_same(tensor.cpu(), reduced([part[i] for part in parts]), f"tensor {i}")
    inputs = [there(part) for part in parts[rank]]
    outputs = [there(torch.zeros(size * part.numel())) for part in inputs]
    with dist._coalescing_manager(device=inputs[0].device, async_ops=is_async) as manager:
        for output, part in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, part)
    if is_async:
        manager.wait()
    for i, output in enumerate(outputs):
        assert_same(output.cpu(), torch.cat([part[i] for part in parts]), f"gathered tensor {i}")


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_coalesced_collectives_are_right(cuda_world: World, is_async: bool) -> None:
    cuda_world.run(coalesced, is_async)


def beside_the_cpu(rank: int, size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for count in (3, 5000):
        parts = [data(r, count) for r in range(size)]
        on_cpu, on_device = parts[rank].clone(), parts[rank].to(device)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (on_device, on_cpu)]
        for work in works:
            work.wait()
        assert_same(on_cpu, reduced(parts), "on the CPU")
        assert_same(on_device.cpu(), reduced(parts), "on the device")
    everybody = [None] * size
    dist.all_gather_object(everybody, {"rank": rank})
    assert everybody == [{"rank": r} for r in range(size)]


def test_one_group_serves_the_cpu_and_the_device(cuda_world: World) -> None:
    cuda_world.run(beside_the_cpu)
