"""Collectives and messages by a vendor's library, the fake one, in CUDA graphs of PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from conftest import begin
from harness import World
from reference import assert_same, data, reduced
from test_cuda_graphs import captured
from test_cuda_nccl import launches, variables


@pytest.fixture(scope="module", params=((2, "nccl"), (4, "rccl")), ids=lambda world: f"{world[0]}-{world[1]}")
def graph_world(request: pytest.FixtureRequest) -> Iterator[World]:
    size, engine = request.param
    others = {"SOFTCUDA_DELAY_US": "100", "SOFTCUDA_WEAK": "1"}
    world = World(size, "shm", variables(size, engine, **others), begin)
    yield world
    world.close()


def replayed(body: Callable[[], None], mode: str = "global") -> torch.cuda.CUDAGraph:
    """A graph of what has run once before, which has the library's calls.

    Returns:
        The graph.
    """
    body()
    torch.cuda.synchronize()
    dist.barrier()
    before = launches()
    graph = captured(body, mode)
    assert launches() > before, "the library's calls are in the graph"
    return graph


def all_kinds(rank: int, size: int, mode: str) -> None:
    own, summed, moved = (torch.zeros(120 * size, device="cuda") for _ in range(3))
    gathered, block = torch.zeros(120 * size * size, device="cuda"), torch.zeros(120, device="cuda")
    first, mine = torch.zeros(30, device="cuda"), torch.zeros(120, device="cuda")
    roots = [torch.zeros(120 * size, device="cuda") for _ in range(size)] if rank == 0 else None

    def body() -> None:
        summed.copy_(own)
        work = dist.all_reduce(summed, async_op=True)
        gathering = dist.all_gather_into_tensor(gathered, own, async_op=True)
        work.wait()
        gathering.wait()
        assert work.is_completed() and work.is_success()
        dist.all_to_all_single(moved, own)
        dist.reduce_scatter_tensor(block, own)
        dist.gather(own, roots, 0)
        dist.scatter(mine, list(own.chunk(size)) if rank == 1 else None, 1)
        dist.broadcast(first, src=0)
        # What is allocated here is the graph's, and another stream uses it.
        dist.all_reduce(torch.empty_like(own).copy_(own), op=dist.ReduceOp.MAX, async_op=True).wait()

    graph = replayed(body, mode)
    for turn in range(1, 4):
        parts = [data(r, 120 * size) + turn for r in range(size)]
        own.copy_(parts[rank])
        first.copy_(torch.full((30,), float(turn if rank == 0 else -1)))
        graph.replay()
        assert_same(summed.cpu(), reduced(parts), f"the sum of replay {turn}")
        assert_same(gathered.cpu(), torch.cat(parts), f"what replay {turn} gathered")
        expected = torch.cat([part.chunk(size)[rank] for part in parts])
        assert_same(moved.cpu(), expected, f"what replay {turn} exchanged")
        assert_same(block.cpu(), reduced(parts).chunk(size)[rank], f"the block of replay {turn}")
        for part, root in zip(parts, roots or [], strict=False):
            assert_same(root.cpu(), part, f"what replay {turn} brought to the root")
        assert_same(mine.cpu(), parts[1].chunk(size)[rank], f"what replay {turn} scattered")
        assert_same(first.cpu(), torch.full((30,), float(turn)), f"what replay {turn} broadcast")


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_every_collective_is_captured(graph_world: World, mode: str) -> None:
    graph_world.run(all_kinds, mode)


def turns(rank: int, size: int) -> None:
    first, second, eager = (torch.full((500,), float(rank + 1), device="cuda") for _ in range(3))
    maximum = replayed(lambda: dist.all_reduce(first, op=dist.ReduceOp.MAX))
    least = replayed(lambda: dist.all_reduce(second, op=dist.ReduceOp.MIN))
    for _ in range(5):
        maximum.replay()
        dist.all_reduce(eager, op=dist.ReduceOp.MAX)
        least.replay()
        dist.all_reduce(eager, op=dist.ReduceOp.MIN, async_op=True).wait()
    assert_same(first.cpu(), torch.full((500,), float(size)), "the first graph")
    assert_same(second.cpu(), torch.ones(500), "the second graph")
    assert_same(eager.cpu(), torch.full((500,), float(size)), "calls between replays")


def test_graphs_take_turns_with_each_other_and_with_calls(graph_world: World) -> None:
    graph_world.run(turns)


def messages(rank: int, size: int) -> None:
    own, came = torch.zeros(700, device="cuda"), torch.zeros(700, device="cuda")
    onward, before = (rank + 1) % size, (rank - 1) % size

    def body() -> None:
        ops = [dist.P2POp(dist.isend, own, onward), dist.P2POp(dist.irecv, came, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    graph = replayed(body)
    for turn in range(3):
        own.copy_(torch.full((700,), 10.0 * turn + rank))
        graph.replay()
        assert_same(came.cpu(), torch.full((700,), 10.0 * turn + before), f"what came in replay {turn}")
        torch.cuda.synchronize()
        dist.barrier()


def test_batches_of_messages_are_captured(graph_world: World) -> None:
    graph_world.run(messages)


def disagreements(rank: int, size: int) -> None:
    tensor, kept = torch.ones(10, device="cuda"), torch.ones(10, device="cuda")
    graph = replayed(lambda: dist.all_reduce(kept, op=dist.ReduceOp.MAX))
    op = dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM
    with pytest.raises(RuntimeError, match="MAX.*SUM|SUM.*MAX"):
        captured(lambda: dist.all_reduce(tensor, op=op))
    graph.replay()
    dist.all_reduce(tensor)
    assert_same(tensor.cpu(), torch.full((10,), float(size)), "the group goes on")
    assert_same(kept.cpu(), torch.ones(10), "so do its graphs")


def test_ranks_that_capture_something_else_are_told_and_go_on(graph_world: World) -> None:
    graph_world.run(disagreements)


def graphs_that_stay(rank: int, size: int) -> None:
    group = dist.new_group(list(range(size)))
    tensor = torch.ones(10, device="cuda")
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    dist.barrier()
    graph = captured(lambda: dist.all_reduce(tensor, group=group))
    graph.replay()
    assert_same(tensor.cpu(), torch.full((10,), float(size * size)), "the replay")
    torch.cuda.synchronize()
    dist.barrier()
    # NCCL's own end of a communicator waits for its graphs; a group's does not.
    dist.destroy_process_group(group)
    graph.replay()
    torch.cuda.synchronize()
    del graph
    gc.collect()
    dist.barrier()


def test_a_graph_may_stay_when_its_group_goes(graph_world: World) -> None:
    graph_world.run(graphs_that_stay)
