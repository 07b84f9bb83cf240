"""Windows of CUDA tensors: the object API, c10d's windows, and what is refused."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import World, fresh_store
from reference import assert_same, data


def comm_of(rank: int, size: int) -> Any:
    place = {"store": fresh_store(), "rank": rank, "size": size}
    return ncclx_rs.new_comm("ncclx", "cuda", abort_process_on_timeout_or_error=False, **place)


def pool_of(comm: Any) -> Any:
    return torch.cuda.MemPool(comm.get_mem_allocator())


def empty(pool: Any, length: int) -> torch.Tensor:
    with torch.cuda.use_mem_pool(pool):
        return torch.empty(length, device="cuda")


def parts_travel_in_a_ring(rank: int, size: int) -> None:
    comm = comm_of(rank, size)
    pool = pool_of(comm)
    length = 3000
    tensor = empty(pool, length).fill_(-1)
    window = comm.new_window()
    window.tensor_register(tensor)
    after, before = (rank + 1) % size, (rank - 1) % size
    assert window.device == tensor.device and window.get_size() == tensor.nbytes
    for turn in range(10):
        mine = data(rank + turn, length).cuda()
        async_op = turn % 2 == 1
        put = window.put(mine, after, 0, async_op)
        signal = window.signal(after, async_op)
        wait = window.wait_signal(before, async_op)
        if async_op:
            for work in (put, signal, wait):
                work.wait()
        assert_same(window.map_remote_tensor(rank).cpu(), data(before + turn, length), f"turn {turn}")
        # The next turn overwrites it.
        window.signal(before)
        window.wait_signal(after)
    back = torch.empty(100, device="cuda")
    window.get(back, after, 200, False)
    assert_same(back.cpu(), data(rank + 9, length)[200:300], "what this rank has put")
    comm.barrier(async_op=False)
    window.tensor_deregister()
    del tensor, window
    comm.finalize()


def test_parts_travel_in_a_ring(cuda_world: World) -> None:
    cuda_world.run(parts_travel_in_a_ring)


def a_persistent_all_gather_repeats(rank: int, size: int) -> None:
    comm = comm_of(rank, size)
    pool, side = pool_of(comm), torch.cuda.Stream()
    for length in (3, 40_000):
        output = empty(pool, length * size).fill_(-1)
        handle = comm.all_gather_p_init(output)
        for turn in range(8):
            mine, async_op = data(rank + turn, length).cuda(), turn % 2 == 1
            with torch.cuda.stream(side if turn % 3 == 2 else torch.cuda.current_stream()):
                side.wait_stream(torch.cuda.default_stream())
                work = comm.all_gather_p_exec(handle, mine, async_op)
                if async_op:
                    work.wait()
                got = output.clone()  # before the next one, for which peers write to it
            torch.cuda.default_stream().wait_stream(side)
            expected = torch.cat([data(r + turn, length) for r in range(size)])
            assert_same(got.cpu(), expected, f"{length} elements, turn {turn}")
        own = output[rank * length : (rank + 1) * length]
        comm.all_gather_p_exec(handle, own)
        assert_same(output.cpu(), expected, "in place")
        comm.all_gather_p_free(handle)
        with pytest.raises(RuntimeError, match="freed"):
            comm.all_gather_p_exec(handle, mine)
        del output, own
    if size > 1:
        with pytest.raises(RuntimeError, match=r"CUDA on rank 0: .*allocate from get_mem_allocator\(\)"):
            comm.all_gather_p_init(torch.empty(4 * size, device="cuda"))
    comm.finalize()


def a_persistent_all_gather_is_captured(rank: int, size: int) -> None:
    comm = comm_of(rank, size)
    output, mine = empty(pool_of(comm), 1000 * size), torch.empty(1000, device="cuda")
    handle = comm.all_gather_p_init(output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.all_gather_p_exec(handle, mine)
    for turn in range(4):
        mine.copy_(data(rank + turn, 1000))
        if turn % 2 == 0:
            graph.replay()
        else:
            comm.all_gather_p_exec(handle, mine)
        expected = torch.cat([data(r + turn, 1000) for r in range(size)])
        assert_same(output.cpu(), expected, f"turn {turn}")
    del graph
    comm.all_gather_p_free(handle)
    comm.finalize()


@pytest.mark.parametrize("what", [a_persistent_all_gather_repeats, a_persistent_all_gather_is_captured])
def test_persistent_all_gathers(cuda_world: World, what: Callable[[int, int], None]) -> None:
    cuda_world.run(what)


def waits_never_block_the_host(rank: int, size: int) -> None:
    comm = comm_of(rank, size)
    store = fresh_store()
    window = comm.new_window()
    window.tensor_register(empty(pool_of(comm), 10).fill_(rank))
    peer = 1 - rank
    if rank < 2:
        work = window.wait_signal(peer, True)
        window.wait_signal(peer)
        if rank == 0:
            assert not work.is_completed()
            store.set("both wait", "yes")
        else:
            store.wait(["both wait"])
        # A stream of its own: neither of the waits holds it up.
        with torch.cuda.stream(torch.cuda.Stream()):
            window.signal(peer)
            window.signal(peer)
        torch.cuda.synchronize()
        assert work.is_completed()
    comm.barrier(async_op=False)
    window.tensor_deregister()
    comm.finalize()


def test_waits_never_block_the_host(cuda_world: World) -> None:
    cuda_world.run(waits_never_block_the_host)


def what_fills_a_tensor_comes_first(rank: int, size: int) -> None:
    comm = comm_of(rank, size)
    window = comm.new_window()
    tensor = empty(pool_of(comm), 100_000)
    # Still on the stream when the tensor is registered; the software CUDA's devices pause.
    source = torch.zeros_like(tensor)
    for _ in range(5):
        tensor.copy_(source)
    window.tensor_register(tensor)
    after, before = (rank + 1) % size, (rank - 1) % size
    window.put(torch.full((100_000,), float(rank), device="cuda"), after, 0, False)
    window.signal(after)
    window.wait_signal(before)
    assert_same(tensor.cpu(), torch.full((100_000,), float(before)), "nothing of the fill comes after the put")
    window.tensor_deregister()
    comm.finalize()


def test_what_fills_a_tensor_comes_before_what_others_put(cuda_world: World) -> None:
    cuda_world.run(what_fills_a_tensor_comes_first)


def ordinary_memory_is_refused(rank: int, size: int) -> None:
    comm = comm_of(rank, size)
    window = comm.new_window()
    with pytest.raises(RuntimeError, match=r"rank 0: the memory of its window.*allocate from get_mem_allocator\(\)"):
        window.tensor_register(torch.zeros(10, device="cuda"))
    with pytest.raises(RuntimeError, match="tensor_register"):
        window.signal(0)
    window.tensor_register(empty(pool_of(comm), 10))
    with pytest.raises(ValueError, match="exceeds the window size"):
        window.put(torch.zeros(11, device="cuda"), 0, 0, False)
    with pytest.raises((ValueError, RuntimeError), match="cpu"):
        window.put(torch.zeros(4), 0, 0, False)
    window.tensor_deregister()
    tensor = torch.ones(5, device="cuda")
    comm.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, async_op=False)
    assert_same(tensor.cpu(), torch.full((5,), float(size)), "the group goes on")
    comm.finalize()


def test_memory_that_no_other_process_can_map_is_refused(cuda_world: World) -> None:
    cuda_world.run(ordinary_memory_is_refused)


def a_limit_names_the_rank(rank: int, size: int) -> None:
    comm = comm_of(rank, size)
    store = fresh_store()
    window = comm.new_window()
    window.tensor_register(empty(pool_of(comm), 10))
    if rank == 0:
        work = window.wait_signal(1, True, timeout=datetime.timedelta(milliseconds=300))
        with pytest.raises(RuntimeError, match="rank 1 did not signal"):
            work.wait_blocking()
        torch.cuda.synchronize()
        store.set("through", "yes")
    else:
        store.wait(["through"])
    comm.abort()


def test_a_limit_names_the_rank(cuda_world: World) -> None:
    cuda_world.run(a_limit_names_the_rank)


def c10ds_windows(rank: int, size: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    if not hasattr(backend, "new_window"):
        return
    device = torch.device("cuda", torch.cuda.current_device())
    tensor = backend.allocate_tensor(100, dtype=torch.float32, device=device).fill_(-1)
    window = backend.new_window()
    window.tensor_register(tensor)
    after, before = (rank + 1) % size, (rank - 1) % size
    window.put(data(rank, 50).cuda(), after, 50, False)
    window.signal(after, False)
    window.wait_signal(before, False)
    assert_same(window.map_remote_tensor(rank).cpu()[50:], data(before, 50), "the second half")
    window.tensor_deregister()


def test_c10ds_windows(cuda_world: World) -> None:
    cuda_world.run(c10ds_windows)


def expandable_segments(rank: int, size: int) -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    comm = comm_of(rank, size)
    tensor = torch.empty(30_000_000, dtype=torch.uint8, device="cuda").fill_(rank)
    window = comm.new_window()
    try:
        window.tensor_register(tensor)
    except RuntimeError as error:
        # PyTorch decides whether its segments can be handed over.
        assert "allocate from get_mem_allocator()" in str(error)
    else:
        copy = torch.empty_like(tensor)
        window.get(copy, (rank + 1) % size, 0, False)
        assert int(copy[0]) == int(copy[-1]) == (rank + 1) % size
        comm.barrier(async_op=False)
        torch.cuda.synchronize()
        window.tensor_deregister()
    comm.finalize()
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_expandable_segments_are_exposed_if_they_can_be(cuda_world: World) -> None:
    cuda_world.run(expandable_segments)


def the_documents_pool(rank: int, size: int) -> None:
    text = (Path(__file__).parents[2] / "docs/object_api.md").read_text()
    (code,) = re.findall(r"^```python\n(pool = torch.cuda.MemPool\(.*?)^```", text, re.MULTILINE | re.DOTALL)
    comm = comm_of(rank, size)
    known: dict[str, Any] = {"comm": comm, "torch": torch}
    exec(code, known)
    window, peer = known["window"], (rank + 1) % size
    window.put(torch.full((2,), rank + 1.0, device="cuda"), peer)
    window.signal(peer)
    window.wait_signal((rank - 1) % size)
    assert known["tensor"][:3].tolist() == [(rank - 1) % size + 1.0] * 2 + [0.0]
    window.tensor_deregister()
    comm.finalize()


def test_the_documents_pool(cuda_world: World) -> None:
    cuda_world.run(the_documents_pool)
