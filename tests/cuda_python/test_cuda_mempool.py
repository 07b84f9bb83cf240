"""The allocator of device memory that other processes can map, under `torch.cuda.MemPool`."""

from __future__ import annotations

import os
import threading

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import World, fresh_store
from reference import assert_same, data, reduced

MIB = 1 << 20


def free_memory() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def a_pool_takes_the_allocator(rank: int, size: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    allocator = backend.mem_allocator
    assert allocator is backend.mem_allocator, "one in a process"
    assert type(allocator) is type(ncclx_rs.get_mem_allocator("ncclx", "cuda"))
    parts = [data(r, 5000) for r in range(size)]
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.empty_cache()
    before = free_memory()
    pool = torch.cuda.MemPool(allocator)
    with torch.cuda.use_mem_pool(pool):
        tensor = parts[rank].cuda()
        large = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    outside = torch.empty(MIB, device="cuda")
    segments = pool.snapshot()
    inside = [tensor.data_ptr(), large.data_ptr()]
    lies_in = [
        any(segment["address"] <= address < segment["address"] + segment["total_size"] for segment in segments)
        for address in (*inside, outside.data_ptr())
    ]
    assert lies_in == [True, True, False]
    dist.all_reduce(tensor)
    assert_same(tensor.cpu(), reduced(parts), "a collective on memory of the pool")
    dist.barrier()
    del tensor, large, pool, outside
    torch.cuda.empty_cache()
    # The driver has it back.
    if torch.cuda.device_count() >= size:
        assert free_memory() >= before - 2 * MIB


def test_a_pool_takes_the_allocator_of_a_backend(cuda_world: World) -> None:
    cuda_world.run(a_pool_takes_the_allocator)


def a_backend_allocates_tensors(rank: int, size: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    device = torch.device("cuda", torch.cuda.current_device())
    assert backend.supports_tensor_alloc(device) and not backend.supports_tensor_alloc(torch.device("cuda", 99))
    tensor = backend.allocate_tensor(1000, dtype=torch.float64, device=device)
    assert (tensor.shape, tensor.dtype, tensor.device) == ((1000,), torch.float64, device)
    tensor.fill_(rank)
    dist.all_reduce(tensor)
    assert_same(tensor.cpu(), torch.full((1000,), sum(range(size)), dtype=torch.float64), "memory of the backend")
    with pytest.raises(ValueError, match="allocate_tensor: argument `device`: expected a CUDA device, got cpu"):
        backend.allocate_tensor(10, dtype=torch.float32, device=torch.device("cpu"))


def test_a_backend_allocates_tensors(cuda_world: World) -> None:
    cuda_world.run(a_backend_allocates_tensors)


def memory_outlives_its_communicator(rank: int, size: int) -> None:
    comm = ncclx_rs.new_comm("ncclx", "cuda", store=fresh_store(), rank=rank, size=size)
    allocator = comm.get_mem_allocator()
    assert comm.mem_allocator is allocator
    pool = torch.cuda.MemPool(allocator)
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.empty(1000, device="cuda").copy_(torch.arange(1000.0))
    comm.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, async_op=False)
    torch.cuda.synchronize()
    comm.finalize()
    assert_same(tensor.cpu(), torch.arange(1000.0) * size, "what was allocated before")
    with torch.cuda.use_mem_pool(pool):
        later = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda").fill_(7)
    assert_same(later.cpu(), torch.full((8 * MIB,), 7, dtype=torch.uint8), "what was allocated after")


def test_memory_outlives_its_communicator(cuda_world: World) -> None:
    cuda_world.run(memory_outlives_its_communicator)


def exhaustion_is_pytorchs_error(rank: int, size: int) -> None:
    pool = torch.cuda.MemPool(dist.group.WORLD._get_backend(torch.device("cuda")).mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
        tensor = torch.empty(1000, device="cuda").fill_(3)
    dist.all_reduce(tensor)
    assert_same(tensor.cpu(), torch.full((1000,), 3.0 * size), "memory after the exhaustion")


def test_exhaustion_is_the_error_that_pytorch_knows(cuda_world: World) -> None:
    cuda_world.run(exhaustion_is_pytorchs_error)


def several_threads_allocate(rank: int, size: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    device = torch.device("cuda", torch.cuda.current_device())
    failures: list[BaseException] = []

    def allocate(number: int) -> None:
        try:
            pool = torch.cuda.MemPool(backend.mem_allocator)
            for turn in range(20):
                with torch.cuda.use_mem_pool(pool):
                    tensor = torch.empty((1 + turn % 3) * 3 * MIB, dtype=torch.uint8, device="cuda")
                tensor.fill_(number)
                other = backend.allocate_tensor(1000, dtype=torch.uint8, device=device).fill_(number)
                assert int(tensor[-1]) == int(other[-1]) == number
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=allocate, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_several_threads_allocate(cuda_world: World) -> None:
    cuda_world.run(several_threads_allocate)


def a_child_leaves_it_alone(rank: int, size: int) -> None:
    import ctypes

    import ncclx_rs._native as native

    pool = torch.cuda.MemPool(dist.group.WORLD._get_backend(torch.device("cuda")).mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.empty(1000, device="cuda").fill_(5)
    torch.cuda.synchronize()
    library = ctypes.CDLL(native.__file__)
    library.ncclx_rs_cuda_malloc.restype = ctypes.c_void_p
    child = os.fork()
    if child == 0:
        library.ncclx_rs_cuda_free(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(4000), 0, None)
        os._exit(0 if library.ncclx_rs_cuda_malloc(ctypes.c_size_t(1000), 0, None) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert_same(tensor.cpu(), torch.full((1000,), 5.0), "after a child tried to free it")


def test_a_forked_child_can_neither_allocate_nor_free(cuda_world: World) -> None:
    cuda_world.run(a_child_leaves_it_alone)


def test_the_allocator_of_the_cpu_stays() -> None:
    assert isinstance(ncclx_rs.get_mem_allocator("ncclx"), ncclx_rs.MemAllocator)
