"""CUDA tensors where UCX connects the ranks: between hosts they pass through the hosts' memory, as over TCP."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import ncclx_rs
import pytest
import torch
from conftest import begin
from harness import HOSTS, World
from test_cuda_collectives import everything
from test_cuda_hosts import from_both_sides
from test_cuda_windows import c10ds_windows, parts_travel_in_a_ring


def begin_on_several_hosts(rank: int) -> None:
    os.environ["NCCLX_RS_HOST_ID"] = HOSTS[int(os.environ["RANKS"])][rank]
    begin(rank)


@pytest.fixture(scope="module", params=[(2, begin), (2, begin_on_several_hosts), (3, begin_on_several_hosts)])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    size, setup = request.param
    variables = {
        "RANKS": str(size),
        "SOFTCUDA_DEVICES": "2",
        "SOFTCUDA_DELAY_US": "100",
        "SOFTCUDA_WEAK": "1",
        "NCCLX_RS_DEVICE_STAGING_BYTES": "65536",
    }
    world = World(size, "ucx", variables, setup)
    yield world
    world.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_every_collective_is_right(ranks: World, is_async: bool) -> None:
    ranks.run(everything, is_async)


@pytest.mark.parametrize("what", [from_both_sides, parts_travel_in_a_ring, c10ds_windows])
def test_long_tensors_and_windows(ranks: World, what: Callable[[int, int], None]) -> None:
    ranks.run(what)


def memory_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="expected a tensor on the CPU, got one on cuda"):
        ncclx_rs.RdmaMemory(torch.zeros(4, device="cuda"))


def test_a_transport_takes_no_memory_of_a_device(ranks: World) -> None:
    ranks.run(memory_is_refused)
