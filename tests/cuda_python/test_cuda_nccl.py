"""Collectives on CUDA tensors by a vendor's library, the fake one, compared with the engine on the CPU."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from conftest import begin
from harness import World, fresh_store, joined
from ncclx_rs._load import native
from test_cuda_collectives import everything
from test_cuda_training import data_parallel, sharded

# How many ranks, and by which library.
WORLDS = ((2, "nccl"), (3, "rccl"))
# What a library reduces, and what goes by streams beside it.
DTYPES = (
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    # As two real numbers.
    torch.complex64,
)
OTHER_DTYPES = (torch.int16, torch.bool)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BXOR")


def launches() -> int:
    """How often a library, and nothing else here, has put something on a stream of this process."""
    uses = ctypes.CDLL(None).softcuda_uses
    uses.restype = ctypes.c_uint64
    return int(uses(b"cuLaunchHostFunc"))


def launched(operation: Callable[[], object]) -> int:
    """How often the library puts something on a stream for an operation."""
    before = launches()
    operation()
    return launches() - before


def variables(size: int, engine: str, **others: str) -> dict[str, str]:
    """The environment of ranks with a device of their own each."""
    return {"SOFTCUDA_DEVICES": str(size), "NCCLX_RS_ENGINE": engine, **others}


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def library_world(request: pytest.FixtureRequest) -> Iterator[World]:
    size, engine = request.param
    others = {"SOFTCUDA_DELAY_US": "100", "SOFTCUDA_WEAK": "1"}
    world = World(size, "shm", variables(size, engine, **others), begin)
    yield world
    world.close()


def counted(rank: int, size: int, is_async: bool) -> None:
    # Of the three lengths that are not zero.
    least = 3 * (9 + 4 * size)
    assert launched(lambda: everything(rank, size, is_async)) >= least, "the library did it"


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_every_collective_is_right(library_world: World, is_async: bool) -> None:
    library_world.run(counted, is_async)


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Small numbers, other ones on each rank, whose sums and products are exact in each type.

    Returns:
        A tensor of 1003 elements.
    """
    numbers = torch.arange(1003) % 3 + (rank == 0)
    return numbers.to(dtype)


def types_and_operations(rank: int, size: int) -> None:
    dist.all_reduce(torch.zeros(1, device="cuda"))
    for dtype in (*DTYPES, *OTHER_DTYPES):
        for name in OPS:
            op = getattr(dist.ReduceOp, name)
            on_cpu, on_device = values(rank, dtype), values(rank, dtype).cuda()
            try:
                dist.all_reduce(on_cpu, op)
            except (RuntimeError, TypeError, ValueError) as error:
                with pytest.raises(type(error)):
                    dist.all_reduce(on_device, op)
                continue
            before = launches()
            dist.all_reduce(on_device, op)
            what = f"{name} of {dtype}"
            is_real = dtype.is_floating_point or dtype.is_complex
            if is_real and name == "AVG":
                assert torch.allclose(on_device.cpu(), on_cpu, rtol=1e-2), what
            else:
                assert torch.equal(on_device.cpu(), on_cpu), what
            is_its = name not in ("AVG", "BAND", "BXOR") or (name == "AVG" and is_real)
            assert launches() - before == int(is_its and dtype in DTYPES), what


def test_types_and_operations_are_those_of_the_cpu(library_world: World) -> None:
    library_world.run(types_and_operations)


def moved(rank: int, size: int) -> None:
    for dtype in (torch.float8_e4m3fn, torch.complex128, torch.bool, torch.uint16):
        raw = torch.arange(64 * dtype.itemsize).remainder(251).add(rank).to(torch.uint8)
        if dtype is torch.bool:
            raw = raw.remainder(2)
        there = torch.empty(size * 64, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(there, raw.view(dtype).cuda())
        here = torch.empty(size * 64, dtype=dtype)
        dist.all_gather_into_tensor(here, raw.view(dtype))
        assert torch.equal(there.cpu().view(torch.uint8), here.view(torch.uint8)), str(dtype)


def test_any_type_is_moved(library_world: World) -> None:
    library_world.run(moved)


def in_a_graph(rank: int, size: int) -> None:
    tensor = torch.full((100,), float(rank + 1), device="cuda")
    dist.all_reduce(tensor)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert tensor.tolist() == [size * (size + 1) / 2] * 100
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * size * (size + 1) / 2] * 100


def test_graphs_go_beside_it(library_world: World) -> None:
    library_world.run(in_a_graph)


def ddp(rank: int, size: int) -> None:
    assert launched(lambda: data_parallel(rank, size)) > 10, "the library did it"


def fsdp2(rank: int, size: int) -> None:
    assert launched(lambda: sharded(rank, size)) > 10, "the library did it"


@pytest.mark.parametrize("training", [ddp, fsdp2])
def test_training_is_as_on_the_cpu(library_world: World, training: Callable[[int, int], None]) -> None:
    library_world.run(training)


def by_objects(rank: int, size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    store = fresh_store()
    comm = ncclx_rs.new_comm("ncclx", device, "objects", store=store, rank=rank, size=size)
    tensor = torch.full((10,), float(rank + 1), device=device)
    assert launched(lambda: comm.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, False)) == 1
    assert tensor.tolist() == [size * (size + 1) / 2] * 10
    gathered = torch.zeros(size * 10, device=device)
    work = comm.all_gather_single(gathered, tensor, True)
    work.wait_blocking()
    assert work.is_completed() and gathered.tolist() == tensor.tolist() * size
    scaled = torch.full((10,), float(rank + 1), device=device)
    assert launched(lambda: comm.all_reduce(scaled, ncclx_rs.ReduceOp.PREMUL_SUM(0.5), False)) == 1
    assert scaled.tolist() == [size * (size + 1) / 4] * 10
    comm.finalize()


def test_the_object_api_goes_by_it(library_world: World) -> None:
    library_world.run(by_objects, join=False)


def recorded(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(7, device="cuda"))
    work = dist.all_reduce(torch.ones(9, device="cuda"), async_op=True)
    assert work is not None
    work.wait(timedelta(seconds=30))
    records = [record for text in native().dumps("a test") for record in json.loads(text)["records"]]
    calls = [(record["call"], record["state"]) for record in records if record["device"]][-2:]
    assert calls == [("all_reduce(SUM, 7 × float32)", "completed"), ("all_reduce(SUM, 9 × float32)", "completed")]


def test_the_flight_recorder_has_its_operations(library_world: World) -> None:
    library_world.run(recorded)


def faulty(rank: int, size: int, expected: str, limit: float) -> None:
    store = fresh_store()
    with joined(timeout=limit):
        tensor = torch.ones(1000, device="cuda")
        dist.all_reduce(tensor)
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=expected):
            dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=60))
        torch.cuda.synchronize()
        assert time.monotonic() - begin < 20, "the stream was not released"
        with pytest.raises(RuntimeError, match=expected):
            dist.all_reduce(tensor)
        store.set(f"failed{rank}", "yes")
        store.wait([f"failed{rank}" for rank in range(size)])


@pytest.mark.parametrize(
    "fault, limit, expected",
    [
        ("1:2:hang", 2.0, r"all ranks called it; rank\(s\) (0, )?1(, 2)? did not finish|did not finish their part"),
        ("1:2:error", 100.0, r"rank 1.*a connection was lost|a connection was lost"),
    ],
    ids=["hang", "error"],
)
def test_a_failure_of_the_library_is_told_to_all_ranks(fault: str, limit: float, expected: str) -> None:
    world = World(3, "shm", variables(3, "nccl", FAKENCCL_FAULT=fault), begin)
    world.run(faulty, expected, limit, join=False)
    world.close()


def without(rank: int, size: int) -> None:
    group = dist.new_group()
    with pytest.raises(ValueError, match=r"engine=nccl: rank 0 has no NCCL: /nowhere/libnccl.so.2 cannot be loaded"):
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == size


def test_a_missing_library_is_one_line_on_all_ranks() -> None:
    world = World(2, "shm", variables(2, "nccl", NCCLX_RS_NCCL_LIBRARY="/nowhere/libnccl.so.2"), begin)
    world.run(without)
    world.close()
