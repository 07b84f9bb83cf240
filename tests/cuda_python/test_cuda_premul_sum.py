"""PREMUL_SUM of CUDA tensors, with factors that the host knows and with factors that it does not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import World, fresh_store
from reference import assert_same, data

FACTORS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.complex64)


def premul(factor: object) -> dist.ReduceOp:
    return dist._make_nccl_premul_sum(factor)


def as_on_the_cpu(rank: int, size: int) -> None:
    for dtype in TYPES:
        for kind in (*FACTORS, None):
            if kind is None:
                on_host = on_device = 3.0 if not dtype.is_floating_point else 0.375
            else:
                on_host = torch.tensor(0.375 if kind.is_floating_point else 3, dtype=kind)
                on_device = on_host.cuda()
            for factor in (on_device, on_host):
                expected, tensor = data(rank, 999, dtype), data(rank, 999, dtype).cuda()
                dist.all_reduce(expected, premul(on_host))
                dist.all_reduce(tensor, premul(factor))
                assert_same(tensor.cpu(), expected, f"all_reduce of {dtype} by {kind}")
            expected, part = torch.empty(10, dtype=dtype), torch.empty(10, dtype=dtype, device="cuda")
            whole = data(rank, 10 * size, dtype)
            dist.reduce_scatter_tensor(expected, whole, premul(on_host))
            work = dist.reduce_scatter_tensor(part, whole.cuda(), premul(on_device), async_op=True)
            work.wait()
            assert_same(part.cpu(), expected, f"reduce_scatter of {dtype} by {kind}")


def test_products_are_the_cpus(cuda_world: World) -> None:
    cuda_world.run(as_on_the_cpu)


def unknown_to_the_host(rank: int, size: int) -> None:
    """The factor is the result of a collective that cannot end before the product is submitted."""
    dist.all_reduce(torch.zeros(1, device="cuda"), premul(1.0))
    torch.cuda.synchronize()
    store = fresh_store()
    for is_async in (False, True):
        first = torch.ones(3, device="cuda")
        tensor = data(rank, 100_000).cuda()
        if rank > 0:
            store.wait([f"submitted{is_async}"])
        dist.all_reduce(first)
        work = dist.all_reduce(tensor, premul(first[1]), async_op=is_async)
        # Its memory is not given out again before the kernel has read it.
        del first
        garbage = [torch.full((3,), 1e9, device="cuda") for _ in range(8)] if rank > 0 else []
        if rank == 0:
            store.set(f"submitted{is_async}", "yes")
        if work is not None:
            work.wait()
        expected = sum(size * data(r, 100_000) for r in range(size))
        assert_same(tensor.cpu(), expected, f"async {is_async}")
        del garbage


def test_a_factor_on_the_device_is_read_there(cuda_world: World) -> None:
    cuda_world.run(unknown_to_the_host)


def wrong_factors(rank: int, size: int) -> None:
    tensor = torch.ones(4, device="cuda")
    dist.all_reduce(tensor)
    for dtype, name in ((torch.complex64, "complex64"), (torch.bool, "bool"), (torch.float8_e5m2, "float8_e5m2")):
        with pytest.raises(ValueError, match=rf"one whole or real number on cuda.*1 × {name}"):
            dist.all_reduce(tensor, premul(torch.ones(1, device="cuda").to(dtype)))
    if torch.cuda.device_count() > 1:
        elsewhere = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
        with pytest.raises(ValueError, match=rf"all_reduce: argument `op`.*got one on cuda:{elsewhere}"):
            dist.all_reduce(tensor, premul(torch.ones(1, device=f"cuda:{elsewhere}")))
    dist.all_reduce(tensor, premul(torch.full((1,), 0.5, device="cuda")))
    assert_same(tensor.cpu(), torch.full((4,), size * size * 0.5), "by a half")


def test_other_factors_are_refused_and_the_group_goes_on(cuda_world: World) -> None:
    cuda_world.run(wrong_factors)
