"""Collectives and messages of CUDA tensors by a vendor's library, the fake one, compared with the engine on the CPU.

The lists of types and reductions are tried on streams, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import ncclx_rs
import pytest
import test_cuda_messages
import torch
import torch.distributed as dist
from conftest import begin, variables
from harness import World, fresh_store, joined, set_timeout
from ncclx_rs._load import native
from reference import any_bits, assert_same
from test_cuda_collectives import everything
from test_cuda_training import data_parallel, sharded

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


def types_and_operations(rank: int, size: int, by_library: bool) -> None:
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
            if by_library and is_real and name == "AVG":
                assert torch.allclose(on_device.cpu(), on_cpu, rtol=1e-2), what
            else:
                assert torch.equal(on_device.cpu(), on_cpu), what
            is_its = name not in ("AVG", "BAND", "BXOR") or (name == "AVG" and is_real)
            assert launches() - before == int(by_library and is_its and dtype in DTYPES), what


def test_types_and_operations_are_those_of_the_cpu(library_world: World) -> None:
    library_world.run(types_and_operations, True)


def test_types_and_operations_on_streams_are_those_of_the_cpu(cuda_world: World) -> None:
    cuda_world.run(types_and_operations, False)


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


def test_any_type_is_moved_on_streams(cuda_world: World) -> None:
    cuda_world.run(moved)


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


def by_name(rank: int, size: int) -> None:
    for name in ("nccl", "nccl-lazy", "rccl"):
        named(name, rank, size)


def named(name: str, rank: int, size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    place = {"store": fresh_store(), "rank": rank, "size": size}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = ncclx_rs.new_comm(name, device, hints={"minCTAs": "4", "maxCTAs": "8", f"{name}Share": "1"}, **place)
    said = [str(warning.message) for warning in caught]
    assert said == [f"ncclx_rs: the hint `{name}Share` is not known and has no effect"], said
    tensor = torch.ones(10, device=device)
    assert launched(lambda: comm.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, False)) == 1, name
    assert tensor.tolist() == [size] * 10 and comm.get_backend() == name
    came = torch.zeros(10, device=device)
    batch = comm.batch_op_create()
    batch.send(tensor, (rank + 1) % size)
    batch.recv(came, (rank - 1) % size)
    batch.issue(False)
    assert came.tolist() == [size] * 10
    child = comm.split(list(range(size))[::-1], "child")
    assert child is not None and child.get_backend() == name and child.rank == size - 1 - rank
    assert launched(lambda: child.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, False)) == 1, name
    assert tensor.tolist() == [size * size] * 10
    child.finalize()
    comm.finalize()


def test_new_comm_takes_it_by_name() -> None:
    world = World(2, "shm", {"SOFTCUDA_DEVICES": "2"}, begin)
    world.run(by_name, join=False)
    world.close()


def misnamed(rank: int, size: int) -> None:
    place = {"store": fresh_store(), "rank": rank, "size": size}

    def refused(kind: type[Exception], match: str, device: str, **hints: str) -> None:
        with pytest.raises(kind, match=match):
            ncclx_rs.new_comm("nccl", device, hints=hints, **place)

    refused(ValueError, 'expected a CUDA device, which alone the backend nccl serves, got cpu; .*"ncclx", "cpu"', "cpu")
    refused(ValueError, "expected engine=nccl, or none, with the backend nccl, got 'streams'", "cuda", engine="streams")
    refused(ValueError, "expected implementation=ncclx_rs or .*=torch, got 'own'", "cuda", implementation="own")
    refused(ValueError, r"expected a CUDA device of this host, got cuda:7: there are 2 CUDA devices", "cuda:7")
    refused(RuntimeError, "invalid argument: minCTAs 8 is above maxCTAs 4", "cuda", minCTAs="8", maxCTAs="4")
    refused(ValueError, "the hint nccl_config is `minCTAs=few`: expected a comma list", "cuda", minCTAs="few")
    missing = r'rank 0 has no NCCL: /nowhere/libnccl.so.2 cannot be loaded: .*gets a NCCL, .*new_comm\("ncclx", ...\)'
    refused(ValueError, missing, "cuda", nccl_library="/nowhere/libnccl.so.2")
    with pytest.raises(ValueError, match=r"takes a PyTorch with RCCL: .* has NCCL; take \"nccl\""):
        ncclx_rs.new_comm("rccl", "cuda", hints={"implementation": "torch"}, **place)


def test_what_a_name_cannot_serve_is_one_line() -> None:
    world = World(2, "shm", {"SOFTCUDA_DEVICES": "2"}, begin)
    world.run(misnamed, join=False)
    world.close()


def bridged(rank: int, size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    place = {"store": fresh_store(), "rank": rank, "size": size, "timeout": 40}
    hints = {"implementation": "torch", "minCTAs": "4", "commName": "mine", "useCtran": "1"}
    with pytest.warns(UserWarning, match="'useCtran' is ignored by PyTorch's ProcessGroupNCCL"):
        comm = ncclx_rs.new_comm("nccl", device, hints=hints, **place)
    group = comm.unsafe_get_backend().c10d
    assert isinstance(group, dist.ProcessGroupNCCL) and (group.rank(), group.size()) == (rank, size)
    assert group.bound_device_id == device and group.options._timeout == timedelta(seconds=40)
    assert (group.options.config.min_ctas, group.options.config.comm_name) == (4, "mine")
    assert comm.get_backend() == "nccl" and comm.get_backend_version() == torch.__version__
    with pytest.raises(ValueError, match="expected a whole number as maxCTAs, got 'many'"):
        ncclx_rs.new_comm("nccl", device, hints={"implementation": "torch", "maxCTAs": "many"}, **place)
    comm.abort()


# Its NCCL is the real one, which finds no GPU here: nothing is sent.
def test_pytorchs_is_bridged() -> None:
    world = World(2, "shm", {"SOFTCUDA_DEVICES": "2"}, begin)
    world.run(bridged, join=False)
    world.close()


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


def called(what: str) -> int:
    """How often this process has called the fake library for something (tests/fakenccl/README.md)."""
    library = os.environ[f"NCCLX_RS_{os.environ['NCCLX_RS_ENGINE'].upper()}_LIBRARY"]
    count = ctypes.CDLL(library).fakenccl_count
    count.restype = ctypes.c_ulong
    return int(count(what.encode()))


def carried(rank: int, size: int, name: str) -> None:
    before = called("sends") + called("receives")
    getattr(test_cuda_messages, name)(rank, size)
    # Some of what is run is between two ranks alone.
    assert rank > 1 or called("sends") + called("receives") > before, "the library did it"


@pytest.mark.parametrize(
    "name",
    ["messages_go_round_a_ring", "sends_block_nobody", "batches", "refusals", "objects", "pipelines"],
)
def test_messages_go_by_it_as_by_streams(library_world: World, name: str) -> None:
    library_world.run(carried, name)


def test_the_object_apis_messages_go_by_it(library_world: World) -> None:
    library_world.run(carried, "object_api", join=False)


def test_messages_of_two_ranks_go_by_it(library_world: World) -> None:
    for what in ("any_type_and_layout", "other_tags"):
        library_world.run(getattr(test_cuda_messages, what))


def test_a_late_sender_holds_up_no_other(library_world: World) -> None:
    if library_world.size == 2:
        pytest.skip("there is no other sender")
    library_world.run(carried, "a_late_sender_holds_up_no_other")


MOVED = (*DTYPES, *OTHER_DTYPES, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64)


def every_type(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    ops = []
    for count in (0, 1, 1003):
        for seed, dtype in enumerate(MOVED):
            came = any_bits(seed, count, dtype).cuda()
            ops += [
                (dist.P2POp(dist.isend, any_bits(100 * rank + seed, count, dtype).cuda(), after), None, dtype),
                (dist.P2POp(dist.irecv, came, before), any_bits(100 * before + seed, count, dtype), dtype),
            ]
    groups, sends = called("groups"), called("sends")
    for work in dist.batch_isend_irecv([op for op, _, _ in ops]):
        work.wait()
    torch.cuda.synchronize()
    # What has no bytes needs no call.
    assert (called("groups") - groups, called("sends") - sends) == (1, 2 * len(MOVED))
    for op, expected, dtype in ops:
        if expected is not None:
            assert_same(op.tensor.cpu(), expected, f"{expected.numel()} of {dtype}")


def test_a_batch_of_every_type_is_one_group(library_world: World) -> None:
    library_world.run(every_type)


def never_received(rank: int, size: int) -> None:
    """Rank 0 sends what rank 1 never receives; other ranks and directions go on."""
    store = fresh_store()
    with joined(timeout=4.0):
        tensor = torch.ones(100_000, device="cuda")
        ops = [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, tensor.clone(), 1 - rank)]
        for work in dist.batch_isend_irecv(ops) if rank < 2 else ():
            work.wait()
        if rank == 0:
            lost = dist.isend(tensor, 1)
            assert lost is not None
            with pytest.raises(RuntimeError, match=r"from rank 0 to rank 1: rank 1 did not call it"):
                lost.wait(timedelta(seconds=60))
            torch.cuda.synchronize()
            records = [record for text in native().dumps("a test") for record in json.loads(text)["records"]]
            last = [record for record in records if record["call"].startswith("send(")][-1]
            assert last["device"] and "rank 1 did not call it" in json.dumps(last), last
            store.set("over", "yes")
        store.wait(["over"])
        if rank < 2:
            dist.recv(tensor, 1) if rank == 0 else dist.send(tensor * 3, 0)
            assert tensor.sum().item() == (300_000 if rank == 0 else 100_000)
        dist.barrier()


def test_a_send_that_nobody_receives_ends_at_its_limit(library_world: World) -> None:
    library_world.run(never_received, join=False)


def faulty(rank: int, size: int, expected: str, limit: float) -> None:
    store = fresh_store()
    with joined():
        tensor = torch.ones(1000, device="cuda")
        dist.all_reduce(tensor)
        set_timeout(dist.group.WORLD, limit)
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
