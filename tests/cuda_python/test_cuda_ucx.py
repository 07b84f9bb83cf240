"""CUDA tensors where UCX connects the ranks: between hosts they pass through the hosts' memory, as over TCP."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from conftest import begin
from harness import HOSTS, World
from test_cuda_collectives import everything
from test_cuda_hosts import from_both_sides
from test_cuda_windows import c10ds_windows, comm_of, empty, parts_travel_in_a_ring, pool_of


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


def windows_tell_the_path_of_gets(rank: int, size: int) -> None:
    comm = comm_of(rank, size)
    window = comm.new_window()
    window.tensor_register(empty(pool_of(comm), 10).fill_(rank))
    hosts = HOSTS[size] if "NCCLX_RS_HOST_ID" in os.environ else "a" * size
    for other in range(size):
        assert window.get_attr(other).get_path == ("mapped" if hosts[other] == hosts[rank] else "messages")
    window.tensor_deregister()
    with pytest.raises(RuntimeError, match="the window has no tensor"):
        window.get_attr(rank)
    comm.finalize()


def test_windows_tell_the_path_of_gets(ranks: World) -> None:
    ranks.run(windows_tell_the_path_of_gets, join=False)
