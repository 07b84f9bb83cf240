"""Collectives and messages by a vendor's library, the fake one, in CUDA graphs that PyTorch captures and replays.

What the graphs of test_cuda_graphs.py compute by programs they compute here by the library, which counts what it has
captured and replayed. What the ranks first call outside of a capture connects them.
"""

from __future__ import annotations

import pytest
import test_cuda_graphs
import torch
from harness import World
from test_cuda_nccl import called


def counts(rank: int, size: int, name: str, *arguments: object) -> None:
    captured, replayed = called("captured"), called("replayed")
    getattr(test_cuda_graphs, name)(rank, size, *arguments)
    torch.cuda.synchronize()
    assert called("captured") > captured, "the library was captured"
    assert called("replayed") > replayed, "the library ran in a replay"


def test_collectives_of_every_kind_are_captured(library_world: World) -> None:
    library_world.run(counts, "blocking_and_asynchronous", True)


@pytest.mark.parametrize("name", ["turns", "factors", "graph_trees", "graphs_that_stay", "object_api"])
def test_what_is_captured_is_as_with_programs(library_world: World, name: str) -> None:
    library_world.run(counts, name, join=name not in ("graphs_that_stay", "object_api"))


def test_a_capture_that_other_ranks_do_not_make_is_an_error(library_world: World) -> None:
    library_world.run(test_cuda_graphs.disagreements)


def test_messages_are_captured(library_world: World) -> None:
    library_world.run(counts, "messages", True)


def test_batches_of_the_object_api_are_captured(library_world: World) -> None:
    library_world.run(counts, "batches_of_the_object_api", True, join=False)
