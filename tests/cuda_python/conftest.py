"""Tests of CUDA tensors on the software CUDA, which `make test-cuda` runs, or on a GPU, where `make gpu` runs them.

A test that takes `cuda_world` runs in worlds whose ranks share one device, and in worlds where each has one of its own.
The devices of the software CUDA pause at random places, so that an order that is missing shows as wrong numbers; the
seed is printed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

# As in tests/python.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("TORCH_FR_DUMP_ON_TIMEOUT", "0")

import fallback
import pytest
import torch
from harness import World

IS_SOFTWARE = "libcuda.so.1" in os.environ.get("LD_PRELOAD", "")

# Threads that would wait for a device if they called it: those that make progress, watch and send heartbeats.
os.environ.setdefault("SOFTCUDA_FORBIDDEN_THREADS", "ncclx_rs engine,ncclx_rs device,ncclx_rs_watch")

if not (torch.version.cuda or "").startswith("13."):
    collect_ignore_glob = ["test_*.py"]
elif not IS_SOFTWARE and os.environ.get("NCCLX_RS_TEST_GPU") != "1":
    raise RuntimeError("run these by `make test-cuda`: without the software CUDA they would try a real one")

# What a GPU cannot be asked for.
ONLY_SOFTWARE = {
    "test_cuda_costs": "counts the calls of the software CUDA",
    "test_cuda_footprint": "asks the software CUDA what is left",
    "test_cuda_nccl_splits": "counts the calls of the fake NCCL",
}

# The number of ranks, and how many devices they share.
WORLDS = ((2, 1), (3, 3))
# How many ranks, and by which vendor's library.
LIBRARY_WORLDS = ((2, "nccl"), (3, "rccl"))

# What every supported PyTorch must pass, which `make compat` runs: something of each subject, in one small world.
SMOKE_WORLD = "2-on-1"
SMOKE = {
    "test_cuda_collectives": ("test_every_collective_is_right", "test_coalesced_collectives_are_right"),
    "test_cuda_streams": (
        "test_wait_orders_the_stream_and_never_blocks_the_host",
        "test_callbacks_of_futures_run_on_streams_after_the_operation",
        "test_groups_may_be_bound_to_a_device",
        "test_the_object_api_serves_the_device",
    ),
    "test_cuda_graphs": ("test_blocking_and_asynchronous_collectives_are_captured", "test_messages_are_captured"),
    "test_cuda_windows": ("test_parts_travel_in_a_ring", "test_c10ds_windows"),
    "test_cuda_messages": (
        "test_batches_exchange_messages_of_any_length",
        "test_objects_travel_as_tensors_of_the_device",
    ),
    "test_cuda_setup": (
        "test_a_bound_group_and_groups_of_it_are_set_up_when_they_are_made",
        "test_bound_groups_that_serve_two_types_of_devices_merge",
    ),
    "test_cuda_mempool": ("test_a_pool_takes_the_allocator_of_a_backend",),
    "test_cuda_training": ("test_ddp_with_overlap_trains_as_on_the_cpu", "test_fsdp2_trains_as_on_the_cpu"),
}


def pytest_configure(config: pytest.Config) -> None:
    # Tests of tests/python, from whose files some are made, carry it.
    config.addinivalue_line("markers", "worlds(sizes, modes): the worlds that the test runs in")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not IS_SOFTWARE and (reason := ONLY_SOFTWARE.get(item.path.stem)):
            item.add_marker(pytest.mark.skip(reason=reason))
        name, _, parameters = item.name.partition("[")
        if name in SMOKE.get(item.path.stem, ()) and SMOKE_WORLD in parameters and "blocking" not in parameters:
            item.add_marker(pytest.mark.smoke)


def begin(rank: int) -> None:
    """Chooses the rank's device, and has PyTorch's own operators run on it."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    fallback.install()


def needs_devices(count: int) -> None:
    """Skips a test where there are fewer devices; the software CUDA has as many as are asked for."""
    if not IS_SOFTWARE and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} devices")


@pytest.fixture(scope="session", params=WORLDS, ids=[f"{size}-on-{devices}" for size, devices in WORLDS])
def cuda_world(request: pytest.FixtureRequest) -> Iterator[World]:
    size, devices = request.param
    needs_devices(devices)
    variables = {"SOFTCUDA_DEVICES": str(devices), "SOFTCUDA_DELAY_US": "200", "SOFTCUDA_WEAK": "1"}
    world = World(size, "shm", variables, begin)
    yield world
    world.close()


def variables(size: int, engine: str, **others: str) -> dict[str, str]:
    """The environment of ranks with a device of their own each."""
    return {"SOFTCUDA_DEVICES": str(size), "NCCLX_RS_ENGINE": engine, **others}


@pytest.fixture(scope="module", params=LIBRARY_WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def library_world(request: pytest.FixtureRequest) -> Iterator[World]:
    size, engine = request.param
    others = {"SOFTCUDA_DELAY_US": "100", "SOFTCUDA_WEAK": "1"}
    world = World(size, "shm", variables(size, engine, **others), begin)
    yield world
    world.close()


# Programs of thousands of operations run without pauses.
@pytest.fixture(scope="session")
def quick_world() -> Iterator[World]:
    """Two ranks on one device."""
    world = World(2, "shm", {"SOFTCUDA_DEVICES": "1", "SOFTCUDA_WEAK": "1"}, begin)
    yield world
    world.close()


@pytest.fixture(scope="session")
def four() -> Iterator[World]:
    """Four ranks on two devices."""
    world = World(4, "shm", {"SOFTCUDA_DEVICES": "2", "SOFTCUDA_WEAK": "1"}, begin)
    yield world
    world.close()
