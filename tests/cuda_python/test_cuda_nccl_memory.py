"""Memory by a vendor's library, the fake one, and tensors that are registered with it."""

from __future__ import annotations

import ctypes
import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from conftest import begin, variables
from harness import World, fresh_store, meet
from ncclx_rs._vendor import find_vendor_library
from reference import assert_same, data, reduced
from test_cuda_nccl import called

MIB = 1 << 20


@pytest.fixture(scope="module", params=["nccl", "rccl"])
def memory_world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(2, "shm", variables(2, request.param, SOFTCUDA_DELAY_US="50"), begin)
    yield world
    world.close()


def joined(rank: int, size: int, backend: str = "ncclx") -> ncclx_rs.TorchComm:
    """A communicator of all ranks, whose failure ends no process."""
    place = {"store": fresh_store(), "rank": rank, "size": size}
    return ncclx_rs.new_comm(backend, torch.device("cuda"), abort_process_on_timeout_or_error=False, **place)


def changes(*names: str) -> Callable[[], list[int]]:
    """How often the library is called for each of these from now on."""
    before = [called(name) for name in names]
    return lambda: [called(name) - count for name, count in zip(names, before, strict=True)]


def until(condition: Callable[[], bool]) -> None:
    """Waits for what other threads do."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + 60, "it does not come"
        time.sleep(0.01)


MEMORY = ("allocations", "registrations", "deregistrations", "frees")


def a_pool_of_the_library(rank: int, size: int) -> None:
    comm = joined(rank, size, os.environ["NCCLX_RS_ENGINE"])
    allocator = comm.get_mem_allocator()
    assert allocator is comm.mem_allocator is ncclx_rs.get_mem_allocator(os.environ["NCCLX_RS_ENGINE"], "cuda")
    # What is left of earlier pools goes first.
    gc.collect()
    torch.cuda.empty_cache()
    counts = changes(*MEMORY)
    pool, other = torch.cuda.MemPool(allocator), torch.cuda.MemPool(allocator)
    parts = [data(r, 5000) for r in range(size)]
    with torch.cuda.use_mem_pool(pool):
        tensor = parts[rank].cuda()
    with torch.cuda.use_mem_pool(other):
        large = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert counts() == [2, 0, 0, 0]
    comm.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, async_op=False)
    assert_same(tensor.cpu(), reduced(parts), "memory of the library")
    comm.all_reduce(tensor[100:200], ncclx_rs.ReduceOp.MAX, async_op=False)
    assert counts() == [2, 1, 0, 0], "the piece that was passed, once"
    comm.broadcast(large[MIB:], 0, async_op=False)
    assert counts() == [2, 2, 0, 0]
    # The driver has one back while the communicator lives, after the call that still uses it.
    comm.broadcast(large, 0, async_op=False)
    del large, other
    torch.cuda.empty_cache()
    until(lambda: counts() == [2, 2, 1, 1])
    comm.finalize()
    until(lambda: counts() == [2, 2, 2, 1])
    assert_same(tensor[:100].cpu(), reduced(parts)[:100], "memory that outlives its communicator")
    del tensor, pool
    gc.collect()
    torch.cuda.empty_cache()
    assert counts() == [2, 2, 2, 2]
    assert called("left") == called("breaches") == 0


def test_a_pool_of_the_library_is_registered_once(memory_world: World) -> None:
    memory_world.run(a_pool_of_the_library, join=False)


def the_process_groups_memory(rank: int, size: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    counts = changes(*MEMORY)
    tensor = backend.allocate_tensor(1000, dtype=torch.float64, device=torch.device("cuda", rank)).fill_(rank)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool(backend.mem_allocator)):
        output = torch.empty(2000, dtype=torch.float64, device="cuda")
    assert counts()[0] == 2
    dist.all_gather_into_tensor(output, tensor)
    assert_same(output.cpu(), torch.arange(2.0).repeat_interleave(1000).double(), "both sides")
    assert counts()[1] == 2
    # Windows take such memory, as they take the engine's own.
    comm = joined(rank, size)
    window = comm.new_window(output)
    window.put(torch.full((3,), 7.0 + rank, dtype=torch.float64, device="cuda"), 1 - rank, 0, async_op=False)
    window.signal(1 - rank, async_op=False)
    window.wait_signal(1 - rank, async_op=False)
    assert output[:3].tolist() == [8.0 - rank] * 3
    window.tensor_deregister()
    comm.finalize()
    assert called("breaches") == 0


def test_a_process_groups_memory_is_the_librarys(memory_world: World) -> None:
    memory_world.run(the_process_groups_memory)


def a_registered_tensor(rank: int, size: int) -> None:
    comm = joined(rank, size)
    counts = changes(*MEMORY)
    tensor, plain = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
    comm.tensor_register(tensor)
    with pytest.raises(RuntimeError, match="registered already"):
        comm.tensor_register(tensor)
    with pytest.raises(ValueError, match="a contiguous tensor"):
        comm.tensor_register(torch.ones(10, 10, device="cuda").t()[1:])
    comm.tensor_register(torch.ones(3))
    for _ in range(3):
        comm.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, async_op=False)
    assert counts() == [0, 1, 0, 0]
    comm.all_reduce(plain, ncclx_rs.ReduceOp.SUM, async_op=False)
    comm.barrier(async_op=False)
    # Ranks of which only some pass registered memory are told, and go on.
    with pytest.raises(RuntimeError, match="disagree on the memory of collective"):
        comm.all_reduce(tensor if rank == 0 else plain, ncclx_rs.ReduceOp.SUM, async_op=True).wait_blocking()
    comm.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    comm.tensor_deregister(tensor)
    ended = called("deregistrations") + called("left")
    assert called("registrations") == ended
    comm.all_reduce(tensor, ncclx_rs.ReduceOp.MAX, async_op=False)
    assert called("registrations") == ended, "it is as any other"
    with pytest.raises(RuntimeError, match="is not registered"):
        comm.tensor_deregister(tensor)
    # The communicator's end undoes it, too, and then the memory goes.
    other = torch.ones(4 * MIB, device="cuda")
    comm.tensor_register(other)
    comm.all_reduce(other, ncclx_rs.ReduceOp.SUM, async_op=False)
    comm.finalize()
    del other, comm
    until(lambda: called("registrations") == called("deregistrations") + called("left"))
    assert called("breaches") == 0


def test_a_tensor_is_registered_until_it_is_not(memory_world: World) -> None:
    memory_world.run(a_registered_tensor, join=False)


def a_child_leaves_it_alone(rank: int, size: int) -> None:
    import ncclx_rs._native as native

    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    with torch.cuda.use_mem_pool(torch.cuda.MemPool(backend.mem_allocator)):
        tensor = torch.empty(1000, device="cuda").fill_(5)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    library = ctypes.CDLL(native.__file__)
    library.ncclx_rs_library_malloc.restype = ctypes.c_void_p
    counts = changes(*MEMORY)
    child = os.fork()
    if child == 0:
        library.ncclx_rs_cuda_free(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(4000), 0, None)
        has_none = library.ncclx_rs_library_malloc(ctypes.c_size_t(1000), 0, None) is None
        os._exit(0 if has_none and counts() == [0, 0, 0, 0] and not called("breaches") else 1)
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(tensor)
    assert_same(tensor.cpu(), torch.full((1000,), 5.0 * size * size), "after a child tried to free it")


def test_a_forked_child_ends_no_registration(memory_world: World) -> None:
    memory_world.run(a_child_leaves_it_alone)


def abort_with_registrations(rank: int, size: int) -> None:
    comm = joined(rank, size)
    pool = torch.cuda.MemPool(comm.get_mem_allocator())
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.ones(4 * MIB, device="cuda")
    lent = torch.ones(100, device="cuda")
    comm.tensor_register(lent)
    for each in (tensor, lent):
        comm.all_reduce(each, ncclx_rs.ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    meet()
    store = fresh_store()
    if rank == 0:
        # Its peer does not come.
        comm.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, async_op=True)
        store.set("called", "yes")
    else:
        store.wait(["called"])
    comm.abort()
    del tensor, lent, pool, comm
    gc.collect()
    torch.cuda.empty_cache()
    until(lambda: called("registrations") == called("deregistrations") + called("left"))
    assert called("breaches") == 0


def test_an_abort_ends_registrations_before_memory_goes(memory_world: World) -> None:
    memory_world.run(abort_with_registrations, join=False)


def without_memory(rank: int, size: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    lacking = "NCCL 2.30.7 has no registered buffers"
    with pytest.warns(UserWarning, match=f"the memory is the engine's own, and is not registered: {lacking}"):
        pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)
    assert_same(tensor.cpu(), torch.full((1000,), float(size)), "the engine's own memory")
    comm = joined(rank, size, "nccl")
    with pytest.warns(UserWarning, match=f"tensor_register: the tensor is not registered: {lacking}"):
        comm.tensor_register(tensor)
    comm.tensor_deregister(tensor)
    comm.finalize()
    assert called("registrations") == called("allocations") == 0
    assert "registered buffers" in find_vendor_library("nccl").lacks


def test_a_library_without_memory_is_said() -> None:
    library = os.path.join(os.environ["SOFTCUDA_HOME"], "nccl/without-memory/libnccl.so.2")
    world = World(2, "shm", variables(2, "nccl", NCCLX_RS_NCCL_LIBRARY=library), begin)
    world.run(without_memory)
    world.close()


def on_streams(rank: int, size: int) -> None:
    comm = joined(rank, size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert comm.get_mem_allocator() is ncclx_rs.get_mem_allocator("ncclx", "cuda")
        tensor = torch.ones(10, 10, device="cuda").t()
        comm.tensor_register(tensor)
        comm.tensor_deregister(tensor)
    assert comm.get_mem_allocator() is not ncclx_rs.get_mem_allocator("nccl", "cuda")
    comm.finalize()


def test_on_streams_nothing_is_registered() -> None:
    world = World(2, "shm", {"SOFTCUDA_DEVICES": "2"}, begin)
    world.run(on_streams, join=False)
    world.close()
