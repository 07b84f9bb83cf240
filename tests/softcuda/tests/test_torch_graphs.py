"""PyTorch's graphs, pools, expandable segments and tensors between processes on the software CUDA."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing
from isolated import alone

SECONDS = 60


def test_graphs_are_captured_with_branches_and_replayed() -> None:
    values = torch.arange(1000.0).pin_memory()
    source = torch.zeros(1000, device="cuda")
    first, second = torch.empty_like(source), torch.empty_like(source)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.copy_(source)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second.copy_(source)
        held = torch.empty(1000, device="cuda").copy_(first)
        torch.cuda.current_stream().wait_stream(side)
    for expected in (values, values.flip(0)):
        source.copy_(expected)
        graph.replay()
        torch.cuda.synchronize()
        for tensor in (first, second, held):
            assert torch.equal(tensor.cpu(), expected)


def events_order_launches() -> None:
    """A launch records and awaits external events as calls at its place would."""
    values = torch.arange(20.0).pin_memory()
    source, passed, got = (torch.zeros(1, device="cuda") for _ in range(3))
    side, graph, event = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.cuda.Event(external=True)
    event.record()
    with torch.cuda.graph(graph):
        event.wait()
        passed.copy_(source)
        event.record()
    for turn in range(len(values)):
        with torch.cuda.stream(side):
            source.copy_(values[turn : turn + 1], non_blocking=True)
            event.record()
        graph.replay()
        with torch.cuda.stream(side):
            event.wait()
            got.copy_(passed)
            assert got.item() == turn


def test_events_of_graphs_order_launches() -> None:
    alone(events_order_launches, SOFTCUDA_DELAY_US="2000", SOFTCUDA_WEAK="1")


def test_what_must_not_be_captured_is_an_error() -> None:
    source = torch.zeros(8, device="cuda")
    target, side = torch.empty_like(source), torch.cuda.Stream()
    with pytest.raises(RuntimeError, match="StreamCaptureInvalidated|StreamCaptureUnsupported"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            target.copy_(source)
            torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="StreamCaptureUnjoined"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            target.copy_(source)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                target.copy_(source)
    torch.cuda.synchronize()
    assert target.copy_(source).cpu().tolist() == [0] * 8


def test_pools_of_memory_are_used() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.zeros(1 << 22, device="cuda")
    assert len(pool.snapshot()) == 1 and tensor.cpu().sum() == 0


def segments_expand() -> None:
    first = torch.zeros(30 << 20, dtype=torch.uint8, device="cuda")
    second = torch.zeros(50 << 20, dtype=torch.uint8, device="cuda")
    assert second.cpu().sum() == 0
    segments = torch.cuda.memory_snapshot()
    assert any(segment["is_expandable"] for segment in segments)
    del first, second
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_segments_expand() -> None:
    alone(segments_expand, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")


def child(to_child: torch.multiprocessing.Queue, to_parent: torch.multiprocessing.Queue) -> None:
    tensor = to_child.get(timeout=SECONDS)
    to_parent.put(tensor.cpu().tolist())
    tensor.copy_(torch.full((8,), 7.0))
    torch.cuda.synchronize()
    to_parent.put("written")
    del tensor
    to_child.get(timeout=SECONDS).wait()
    to_parent.put("waited")


def tensors_travel() -> None:
    context = torch.multiprocessing.get_context("spawn")
    to_child, to_parent = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(to_child, to_parent), daemon=True)
    process.start()
    tensor = torch.empty(8, device="cuda").copy_(torch.arange(8.0))
    to_child.put(tensor)
    assert to_parent.get(timeout=SECONDS) == list(range(8))
    assert to_parent.get(timeout=SECONDS) == "written"
    assert tensor.cpu().tolist() == [7] * 8
    done = torch.cuda.Event(interprocess=True, enable_timing=False)
    done.record()
    to_child.put(done)
    assert to_parent.get(timeout=SECONDS) == "waited"
    process.join(SECONDS)
    assert process.exitcode == 0


def test_tensors_and_events_travel_between_processes() -> None:
    alone(tensors_travel)
