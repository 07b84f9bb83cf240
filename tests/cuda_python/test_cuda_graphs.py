"""Collectives, messages and accesses to windows in CUDA graphs, captured and replayed by PyTorch.

The software CUDA computes PyTorch's operators on the CPU, which cannot be captured: these graphs have collectives and
copies.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from harness import World, fresh_store, joined
from reference import assert_same, data, reduced


def warm() -> None:
    """The first operation on a device blocks until all ranks have called it."""
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()


def captured(body: Callable[[], None], mode: str = "global") -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        body()
    return graph


def blocking_and_asynchronous(rank: int, size: int, connect: bool = False) -> None:
    own, summed = torch.zeros(3000, device="cuda"), torch.zeros(3000, device="cuda")
    gathered, moved = torch.zeros(3000 * size, device="cuda"), torch.zeros(3000, device="cuda")
    first = torch.zeros(30, device="cuda")

    def body() -> None:
        summed.copy_(own)
        work = dist.all_reduce(summed, async_op=True)
        gathering = dist.all_gather_into_tensor(gathered, own, async_op=True)
        work.wait()
        gathering.wait()
        if torch.cuda.is_current_stream_capturing():
            assert work.is_completed() and work.is_success()
        dist.all_to_all_single(moved, own)
        dist.broadcast(first, src=0)
        # What is allocated here is the graph's, and another stream uses it.
        dist.all_reduce(torch.empty_like(own).copy_(own), op=dist.ReduceOp.MAX, async_op=True).wait()

    if connect:
        body()
    # Otherwise the ranks have called nothing on this device before.
    graph = captured(body)
    for turn in range(4):
        parts = [data(r, 3000) + turn for r in range(size)]
        own.copy_(parts[rank])
        first.copy_(torch.full((30,), float(turn if rank == 0 else -1)))
        graph.replay()
        assert_same(summed.cpu(), reduced(parts), f"the sum of replay {turn}")
        assert_same(gathered.cpu(), torch.cat(parts), f"what replay {turn} gathered")
        expected = torch.cat([part.chunk(size)[rank] for part in parts])
        assert_same(moved.cpu(), expected, f"what replay {turn} exchanged")
        assert_same(first.cpu(), torch.full((30,), float(turn)), f"what replay {turn} broadcast")


def test_blocking_and_asynchronous_collectives_are_captured(cuda_world: World) -> None:
    cuda_world.run(blocking_and_asynchronous)


def turns(rank: int, size: int) -> None:
    warm()
    first, second, eager = (torch.full((500,), float(rank + 1), device="cuda") for _ in range(3))
    maximum = captured(lambda: dist.all_reduce(first, op=dist.ReduceOp.MAX))
    average = captured(lambda: dist.all_reduce(second, op=dist.ReduceOp.AVG))
    side = torch.cuda.Stream()
    for _ in range(10):
        maximum.replay()
        dist.all_reduce(eager, op=dist.ReduceOp.MAX)
        average.replay()
        with torch.cuda.stream(side):
            work = dist.all_reduce(eager, op=dist.ReduceOp.MIN, async_op=True)
        work.wait()
    mean = (size + 1) / 2
    assert_same(first.cpu(), torch.full((500,), float(size)), "the first graph")
    assert_same(second.cpu(), torch.full((500,), mean), "the second graph")
    assert_same(eager.cpu(), torch.full((500,), float(size)), "calls between replays")


def test_graphs_take_turns_with_each_other_and_with_calls(cuda_world: World) -> None:
    cuda_world.run(turns)


def graph_trees(rank: int, size: int) -> None:
    """What torch.compile captures: two eager calls, one that captures, replays."""
    from torch._inductor.cudagraph_trees import get_manager

    @torch.compile(backend="cudagraphs", fullgraph=True)
    def step(tensor: torch.Tensor) -> torch.Tensor:
        summed = funcol.wait_tensor(funcol.all_reduce(tensor, "sum", dist.group.WORLD))
        return funcol.wait_tensor(funcol.all_gather_tensor(summed, 0, dist.group.WORLD))

    for turn in range(6):
        parts = [data(r, 300) + turn for r in range(size)]
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(step(parts[rank].cuda()).cpu(), reduced(parts).repeat(size), f"step {turn}")
    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None and any(manager.roots.values()), "there is a graph"
    torch.compiler.reset()


def test_torch_compile_captures_collectives(cuda_world: World) -> None:
    cuda_world.run(graph_trees)


def factors(rank: int, size: int) -> None:
    own, tensor = torch.ones(50, device="cuda"), torch.zeros(50, device="cuda")
    factor = torch.ones(1, device="cuda")

    def body() -> None:
        tensor.copy_(own)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor[0]))

    graph = captured(body)
    for value in (3.0, 0.5):
        factor.copy_(torch.tensor([value]))
        graph.replay()
        assert_same(tensor.cpu(), torch.full((50,), value * size), f"products with {value}")


def test_a_replay_reads_the_factor_of_its_time(cuda_world: World) -> None:
    cuda_world.run(factors)


def disagreements(rank: int, size: int) -> None:
    warm()
    tensor = torch.ones(10, device="cuda")
    if rank == 0:
        with pytest.raises(RuntimeError, match="eagerly.*in a graph's capture|in a graph's capture.*eagerly"):
            captured(lambda: dist.all_reduce(tensor))
    else:
        with pytest.raises(RuntimeError, match="eagerly.*in a graph's capture|in a graph's capture.*eagerly"):
            dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=60))
    torch.cuda.synchronize()
    again = torch.full((3,), float(rank), device="cuda")
    graph = captured(lambda: dist.all_reduce(again))
    graph.replay()
    assert again.cpu().tolist() == [sum(range(size))] * 3


def test_a_capture_that_other_ranks_do_not_make_is_an_error(cuda_world: World) -> None:
    cuda_world.run(disagreements)


def graphs_that_stay(rank: int, size: int) -> None:
    with joined():
        tensor = torch.full((100,), 1.0, device="cuda")
        graph = captured(lambda: dist.all_reduce(tensor))
        graph.replay()
        assert tensor.cpu().tolist() == [float(size)] * 100
        dist.barrier()
    # It computes nothing any more, but ends.
    graph.replay()
    torch.cuda.synchronize()
    del graph
    gc.collect()


def test_a_graph_may_stay_when_its_group_goes(cuda_world: World) -> None:
    cuda_world.run(graphs_that_stay, join=False)


def object_api(rank: int, size: int) -> None:
    import ncclx_rs

    comm = ncclx_rs.new_comm("ncclx", "cuda", store=fresh_store(), rank=rank, size=size)
    parts = [data(r, 5000) for r in range(size)]
    own, tensor = parts[rank].cuda(), torch.zeros(5000, device="cuda")

    def body() -> None:
        tensor.copy_(own)
        comm.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, False)
        comm.barrier(True).wait()

    graph = captured(body, "thread_local")
    for _ in range(3):
        graph.replay()
        assert_same(tensor.cpu(), reduced(parts), "a replay")
    del graph
    comm.finalize()


def test_the_object_api_takes_part_in_captures(cuda_world: World) -> None:
    cuda_world.run(object_api, join=False)


def windows(rank: int, size: int) -> None:
    import ncclx_rs

    comm = ncclx_rs.new_comm("ncclx", "cuda", store=fresh_store(), rank=rank, size=size)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool(comm.get_mem_allocator())):
        tensor = torch.full((3000,), -1.0, device="cuda")
    window = comm.new_window()
    window.tensor_register(tensor)
    own, came = torch.zeros(3000, device="cuda"), torch.zeros(3000, device="cuda")
    after, before = (rank + 1) % size, (rank - 1) % size

    def body() -> None:
        # Puts and signals go on one stream of the communicator, waits on another one.
        put = window.put(own, after, 0, True)
        signal = window.signal(after, True)
        window.wait_signal(before, True).wait()
        for work in (put, signal):
            work.wait()
            assert work.is_completed()
        came.copy_(tensor)
        # The next replay overwrites it.
        window.signal(before)
        window.wait_signal(after)

    graph = captured(body)
    for turn in range(10):
        own.copy_(data(rank, 3000) + turn)
        graph.replay()
        assert_same(came.cpu(), data(before, 3000) + turn, f"what came in replay {turn}")
    # Outside of the graph the window goes on.
    window.signal(after)
    window.wait_signal(before)
    comm.barrier(async_op=False)
    window.tensor_deregister()
    del graph
    comm.finalize()


def test_accesses_to_windows_are_captured(cuda_world: World) -> None:
    cuda_world.run(windows, join=False)


def registrations(rank: int, size: int) -> None:
    import ncclx_rs

    comm = ncclx_rs.new_comm("ncclx", "cuda", store=fresh_store(), rank=rank, size=size)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool(comm.get_mem_allocator())):
        tensors = [torch.full((100,), -1.0, device="cuda") for _ in range(2)]
    new, registered = comm.new_window(), comm.new_window()
    registered.tensor_register(tensors[0])
    summed = torch.full((10,), float(rank), device="cuda")
    refused = "expected a call outside of CUDA graph captures"

    def body() -> None:
        with pytest.raises(ValueError, match=f"window_register: {refused}"):
            new.tensor_register(tensors[1])
        with pytest.raises(ValueError, match=f"window_deregister: {refused}"):
            registered.tensor_deregister()
        # The capture is not spoilt.
        comm.all_reduce(summed, ncclx_rs.ReduceOp.MAX, False)

    graph = captured(body)
    graph.replay()
    assert summed.cpu().tolist() == [float(size - 1)] * 10
    # Nothing was registered, and nothing was deregistered.
    after, before = (rank + 1) % size, (rank - 1) % size
    new.tensor_register(tensors[1])
    for window, tensor in ((new, tensors[1]), (registered, tensors[0])):
        window.put(torch.full((100,), float(rank), device="cuda"), after, 0, False)
        window.signal(after)
        window.wait_signal(before)
        assert tensor.cpu().tolist() == [float(before)] * 100
        comm.barrier(async_op=False)
        window.tensor_deregister()
    del graph
    comm.finalize()


def test_windows_are_not_registered_in_captures(cuda_world: World) -> None:
    cuda_world.run(registrations, join=False)


def messages(rank: int, size: int, connect: bool = False) -> None:
    own, came, back = (torch.zeros(3000, device="cuda") for _ in range(3))
    after, before = (rank + 1) % size, (rank - 1) % size

    def body() -> None:
        ops = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, came, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        # Rank 0 begins and ends a chain.
        if rank == 0:
            dist.send(came, after)
            dist.recv(back, before)
        else:
            work = dist.irecv(back, before)
            assert work is not None
            work.wait()
            if torch.cuda.is_current_stream_capturing():
                assert work.is_completed()
            dist.isend(back, after).wait()

    if connect:
        body()
    # Otherwise the ranks have called nothing on this device before.
    graph = captured(body)
    for turn in range(5):
        own.copy_(data(rank, 3000) + turn)
        graph.replay()
        # Calls go beside it.
        eager = torch.full((7,), float(rank), device="cuda")
        ops = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, torch.empty_like(own), before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dist.all_reduce(eager)
        assert_same(came.cpu(), data(before, 3000) + turn, f"what came in replay {turn}")
        assert_same(back.cpu(), data(size - 1, 3000) + turn, f"what went round in replay {turn}")
        assert eager.cpu().tolist() == [sum(range(size))] * 7


def test_messages_are_captured(cuda_world: World) -> None:
    cuda_world.run(messages)


def batches_of_the_object_api(rank: int, size: int, connect: bool = False) -> None:
    import ncclx_rs

    comm = ncclx_rs.new_comm("ncclx", "cuda", store=fresh_store(), rank=rank, size=size)
    own, came = data(rank, 5000).cuda(), torch.zeros(5000, device="cuda")
    after, before = (rank + 1) % size, (rank - 1) % size

    def body() -> None:
        batch = comm.batch_op_create()
        batch.send(own, after)
        batch.recv(came, before)
        batch.issue(True).wait()
        if rank == 0:
            comm.send(came, after, False)
        elif rank == 1:
            comm.recv(own, 0, False)

    if connect:
        body()
        own.copy_(data(rank, 5000))
        torch.cuda.synchronize()
    graph = captured(body, "thread_local")
    expected = [data(r, 5000) for r in range(size)]
    for turn in range(3):
        graph.replay()
        assert_same(came.cpu(), expected[before], f"what came in replay {turn}")
        expected[1] = expected[-1]
    comm.barrier(async_op=False)
    del graph
    comm.finalize()


def test_batches_of_the_object_api_are_captured(cuda_world: World) -> None:
    cuda_world.run(batches_of_the_object_api, join=False)


def ends_that_disagree(rank: int, size: int) -> None:
    own = torch.ones(10, device="cuda")
    if rank < 2:
        graph = captured(lambda: dist.send(own, 1) if rank == 0 else dist.recv(own, 0), "thread_local")
        store = fresh_store()
        if rank == 0:
            captured(lambda: dist.send(own, 1), "thread_local")
            store.set("captured", "yes")
            store.wait(["told"])
        else:
            store.wait(["captured"])
            with pytest.raises(RuntimeError, match="in a graph's capture"):
                dist.recv(own, 0)
            store.set("told", "yes")
        # Both begin anew, and the graph of before goes on.
        graph.replay()
        dist.send(own, 1) if rank == 0 else dist.recv(own, 0)
        torch.cuda.synchronize()


def test_a_message_that_the_other_end_does_not_capture_is_an_error(cuda_world: World) -> None:
    cuda_world.run(ends_that_disagree)
