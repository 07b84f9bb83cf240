"""Fixtures: the worlds that tests run in.

A test that takes `world` runs in a world of each size, and over each transport in one of the sizes that `sizes_of`
says; `@pytest.mark.worlds(sizes=..., modes=...)` narrows that, and with NCCLX_RS_EVERY_WORLD=1 each size goes over each
transport. Tests that kill ranks or leave a broken group behind take `fresh_world`, whose workers no other test uses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

# Ranks share the cores; set before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# PyTorch's TCP store looks up the name of each client. If the answer gets lost, the lookup takes this timeout.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# A failure writes a trace to the home folder; only tests of that turn it on.
os.environ.setdefault("TORCH_FR_DUMP_ON_TIMEOUT", "0")

import pytest
from harness import BACKEND, MODES, UCX_WAYS, World

SIZES = (1, 2, 3, 4)
# Files whose tests start programs, most of which import torch: half of the time of all.
PROGRAM_FILES = (
    "test_autoload",
    "test_bench",
    "test_code_blocks",
    "test_examples",
    "test_exits",
    "test_info",
    "test_library_backends",
    "test_newcomers",
    "test_programs",
    "test_take_over",
    "test_torchft",
    "test_torchtitan",
    "test_tutorials",
)
# Files whose tests wait most of their time: for what has failed, for time limits and for slow networks.
FAULT_FILES = (
    "test_chaos",
    "test_failures",
    "test_logging",
    "test_monitored_barrier",
    "test_network",
    "test_peer_loss",
    "test_rails",
    "test_reconfigure",
    "test_rendezvous",
    "test_security",
    "test_surroundings",
)
# The tests of those files, of the others, and those that are to run alone.
PARTS = ("programs", "faults", "worlds", "alone")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", choices=PARTS, help="run a part of the tests, so that two parts can run beside each other"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "worlds(sizes, modes): the worlds that the test runs in")
    config.addinivalue_line("markers", "alone: it compares times, so that no other test is to run beside it")


def pytest_report_header() -> str:
    return f"backend under test: {BACKEND}"


def sizes_of(mode: str, sizes: Sequence[int], modes: Sequence[str]) -> Sequence[int]:
    """The sizes of a test's worlds over one of its transports. What is of the size shows over the first."""
    # UCX has one of its ways for each.
    if mode == "ucx":
        return [size for size in sizes if size in UCX_WAYS]
    if mode in (modes[0], "shm") or os.environ.get("NCCLX_RS_EVERY_WORLD") == "1":
        return sizes
    # Ranks that talk to two others, and two hosts of two ranks.
    usual = {"tcp": 3, "hier": 4}[mode]
    return [usual if usual in sizes else max(sizes)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("worlds")
    chosen = marker.kwargs if marker else {}
    sizes, modes = chosen.get("sizes", SIZES), chosen.get("modes", MODES)
    # A single rank has no transport to vary.
    pairs = [(size, mode) for size in sizes for mode in (modes if size > 1 else modes[:1])]
    worlds = [(size, mode) for size, mode in pairs if size in sizes_of(mode, sizes, modes)]
    for fixture, scope in (("world", "session"), ("fresh_world", "function")):
        if fixture in metafunc.fixturenames:
            names = [f"{size}-{mode}" for size, mode in worlds]
            metafunc.parametrize(fixture, worlds, indirect=True, scope=scope, ids=names)


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    size, mode = request.param
    world = World(size, mode)
    yield world
    world.close()


@pytest.fixture
def fresh_world(request: pytest.FixtureRequest) -> Iterator[World]:
    size, mode = request.param
    world = World(size, mode)
    yield world
    world.close()


# The tests that every supported PyTorch must pass: one file for each subject, in one small world.
SMOKE_FILES = (
    "test_autoload",
    "test_backend",
    "test_coalescing",
    "test_collectives",
    "test_device_mesh",
    "test_frameworks",
    "test_object_api",
    "test_p2p",
    "test_windows",
)
SMOKE_WORLD = "2-shm"


# Tests that start programs or worlds of their own and show little that the rest of the set does not: `make quick`
# leaves them out.
SLOW = (
    "an_operation_in_flight_ends_with_the_interpreter[split]",
    "failures_are_written_down_without_pytorchs_recorder",
    "programs_run_in_pytorchs_torchcomms_mode",
    "torchcomms_programs_run_as_they_are",
)
# Nearly all of their time is the import of torch, in an interpreter each. One of them is enough after a change of the
# engine.
IMPORTS = "test_autoload"
QUICK_IMPORT = "a_variable_makes_it_the_default"


def part_of(item: pytest.Item) -> str:
    if item.get_closest_marker("alone") is not None:
        return "alone"
    if item.path.stem in PROGRAM_FILES:
        return "programs"
    return "faults" if item.path.stem in FAULT_FILES else "worlds"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (part := config.getoption("--part")) is not None:
        config.hook.pytest_deselected(items=[item for item in items if part_of(item) != part])
        items[:] = [item for item in items if part_of(item) == part]
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if item.path.stem in SMOKE_FILES and ("world" not in fixtures or SMOKE_WORLD in item.name):
            item.add_marker(pytest.mark.smoke)
        # A failure shows over shared memory as over the other transports.
        elsewhere = "fresh_world" in fixtures and any(f"-{mode}" in item.name for mode in MODES if mode != "shm")
        imports = item.path.stem == IMPORTS and QUICK_IMPORT not in item.name
        if elsewhere or imports or any(name in item.name for name in SLOW):
            item.add_marker(pytest.mark.slow)
