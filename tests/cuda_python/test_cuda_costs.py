"""What an operation on CUDA tensors costs: calls of the driver, words, bytes, kernels. costs.json has the bounds.

The software CUDA counts. `NCCLX_RS_COSTS_UPDATE=1 make python-test-cuda` writes what is counted as the new bounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import begin, variables
from harness import World
from test_cuda_graphs import captured

BOUNDS = Path(__file__).with_name("costs.json")
UPDATE = os.environ.get("NCCLX_RS_COSTS_UPDATE") == "1"
# Half the staging memory, so that the longer operations take several segments.
STAGING = 1 << 16
COUNTS = (1000, 60_000)

Costs = dict[str, int]


@pytest.fixture(scope="module", params=(2, 4))
def counted_world(request: pytest.FixtureRequest) -> Iterator[World]:
    settings = {"SOFTCUDA_DEVICES": "1", "NCCLX_RS_DEVICE_STAGING_BYTES": str(STAGING)}
    world = World(request.param, "shm", settings, begin)
    yield world
    world.close()


def driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.softcuda_copied_bytes.restype = library.softcuda_words.restype = ctypes.c_uint64
    library.softcuda_calls.restype = ctypes.c_size_t
    return library


def counted() -> Costs:
    library = driver()
    text = ctypes.create_string_buffer(1 << 16)
    library.softcuda_calls(text, ctypes.c_size_t(len(text)))
    uses = {name: int(number) for name, number in (line.split() for line in text.value.decode().splitlines())}
    return {
        "calls": sum(uses.values()),
        "words": library.softcuda_words(),
        "bytes": library.softcuda_copied_bytes(),
        "kernels": sum(number for name, number in uses.items() if name.startswith("cuLaunchKernel")),
    }


def collectives(rank: int, size: int, count: int, window: Window) -> dict[str, Callable[[], object]]:
    """Every collective of so many elements a rank, on tensors that are made before anything is counted."""
    one, other = torch.ones(count, device="cuda"), torch.ones(count, device="cuda")
    many, more = torch.ones(size * count, device="cuda"), torch.ones(size * count, device="cuda")
    blocks, roots = list(many.chunk(size)), list(more.chunk(size)) if rank == 0 else None
    return {
        "all_reduce": lambda: dist.all_reduce(one),
        "reduce": lambda: dist.reduce(one, 0),
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_gather": lambda: dist.all_gather(blocks, one),
        "all_gather_p": lambda: window.all_gather(one),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(many, one),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one, many),
        "all_to_all_single": lambda: dist.all_to_all_single(many, more),
        "gather": lambda: dist.gather(other, roots, 0),
        "scatter": lambda: dist.scatter(other, roots, 0),
    }


class Window:
    """A window of the default group, to be gathered into."""

    def __init__(self, length: int) -> None:
        self.backend = dist.group.WORLD._get_backend(torch.device("cuda"))
        with torch.cuda.use_mem_pool(torch.cuda.MemPool(self.backend.mem_allocator)):
            self.output = torch.zeros(length, device="cuda")
        self.number = self.backend._window_register(self.output)

    def all_gather(self, tensor: torch.Tensor) -> None:
        self.backend._window_all_gather(self.number, self.output, tensor)


def costs(rank: int, size: int) -> dict[str, Costs]:
    found = {}
    windows = {count: Window(size * count) for count in COUNTS}
    for count in COUNTS:
        for name, call in collectives(rank, size, count, windows[count]).items():
            for _ in range(2):  # what is made once: kernels, plans
                call()
            torch.cuda.synchronize()
            dist.barrier()
            before = counted()
            call()
            found[f"{name} of {count}"] = {what: number - before[what] for what, number in counted().items()}
            torch.cuda.synchronize()
    for window in windows.values():
        window.backend._window_deregister(window.number)
    return found


def test_an_operation_costs_no_more_than_its_bounds(counted_world: World) -> None:
    ranks = counted_world.run(costs)
    # The most of any rank.
    found = {
        f"{name} on {counted_world.size} ranks": {what: max(r[name][what] for r in ranks) for what in ranks[0][name]}
        for name in ranks[0]
    }
    bounds = json.loads(BOUNDS.read_text()) if BOUNDS.exists() else {}
    if UPDATE:
        BOUNDS.write_text(json.dumps(bounds | found, indent=1) + "\n")
        return
    # Each rank writes its block once to each rank's memory, and nothing is staged.
    for count in COUNTS:
        gathered = found[f"all_gather_p of {count} on {counted_world.size} ranks"]
        assert gathered["bytes"] == 4 * count * counted_world.size, gathered
    assert all(
        number > 0 for number in found["all_reduce of 1000 on 2 ranks".replace("2", str(counted_world.size))].values()
    )
    over = {
        name: (cost, bounds[name])
        for name, cost in found.items()
        if any(number > bounds[name][what] for what, number in cost.items())
    }
    assert not over, over


def wake_ups() -> int:
    """How often the engine's threads of this process have begun to wait; but not the one that calls back afterwards."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            name = (task / "comm").read_text().strip()
            if name.startswith("ncclx_rs") and name != "ncclx_rs_done":
                status = (task / "status").read_text()
                total += int(status.split("voluntary_ctxt_switches:")[1].split()[0])
    return total


def nobody_wakes_up(rank: int, size: int) -> None:
    tensor = torch.ones(100, device="cuda")
    dist.all_reduce(tensor)
    dist.barrier()
    gc.collect()
    operations, before, began = 400, wake_ups(), time.monotonic()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(operations)]
    torch.cuda.synchronize()
    woken = wake_ups() - before
    # Beside operations, threads look at the clock: a few times a second each.
    allowed = operations / 4 + 60 * (time.monotonic() - began)
    assert woken <= allowed, f"{woken} times for {operations} operations"
    # Those that make progress, watch or send heartbeats must not call CUDA: see conftest.py.
    assert ctypes.CDLL(None).softcuda_breaches() == 0
    del works


def test_operations_wake_no_thread(counted_world: World) -> None:
    counted_world.run(nobody_wakes_up)


def replays_are_launches(rank: int, size: int) -> None:
    windows = {count: Window(size * count) for count in COUNTS}
    calls = {
        f"{name} of {count}": call
        for count in COUNTS
        for name, call in collectives(rank, size, count, windows[count]).items()
        if name != "all_gather_p"
    }
    for call in calls.values():
        call()
    copied = torch.zeros(2, 1, device="cuda")
    bodies = {"a copy": lambda: copied[0].copy_(copied[1]), **calls}
    graphs = {name: captured(body) for name, body in bodies.items()}
    called = {}
    gc.collect()
    for name, graph in graphs.items():
        graph.replay()
        torch.cuda.synchronize()
        before = counted()["calls"]
        graph.replay()
        called[name] = counted()["calls"] - before
    assert set(called.values()) == {called["a copy"]}, called
    torch.cuda.synchronize()
    for window in windows.values():
        window.backend._window_deregister(window.number)


def test_a_replay_costs_a_launch(counted_world: World) -> None:
    counted_world.run(replays_are_launches)


def test_a_replay_by_a_library_costs_a_launch() -> None:
    world = World(2, "shm", variables(2, "nccl"), begin)
    try:
        world.run(replays_are_launches)
    finally:
        world.close()
