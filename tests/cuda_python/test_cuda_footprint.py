"""What stays in memory and open after operations and communicators on a device: nothing.

`NCCLX_RS_SOAK_CUDA=10` runs ten times as many (`make soak-cuda`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import begin
from harness import World
from test_footprint import own_memory

TIMES = int(os.environ.get("NCCLX_RS_SOAK_CUDA", "1"))
OPERATIONS, COMMUNICATORS = 10_000 * TIMES, 100 * TIMES

# Threads that a process keeps once it has needed them.
KEPT = ("ncclx_rs_done", "ncclx_rs_log", "ncclx_rs device", "ncclx_rs reaper")


@pytest.fixture(scope="module")
def plain_world() -> Iterator[World]:
    """Two ranks on one device, whose memory is not weak: each store would cost an allocation."""
    world = World(2, "shm", {"SOFTCUDA_DEVICES": "1"}, begin)
    yield world
    world.close()


def handles() -> dict[str, int]:
    """What this process holds of the driver, and of the system."""
    library = ctypes.CDLL("libcuda.so.1")
    library.softcuda_living.restype = ctypes.c_long
    kinds = ("device memory", "host memory", "registration", "stream", "event", "handle", "addresses", "module")
    held = {kind: library.softcuda_living(kind.encode()) for kind in kinds}
    return {**held, "files": len(os.listdir("/proc/self/fd")), "threads": len(own_threads())}


def own_threads() -> list[str]:
    """The threads that are this project's. The software CUDA has one for each stream of PyTorch's that was used."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    return [name for name in names if name.startswith("ncclx_rs") and name not in KEPT]


def at_rest() -> dict[str, int]:
    """The handles once they stay the same: memory is given back by a thread of its own, when nothing is in flight."""
    gc.collect()
    before, now = {}, handles()
    while before != now:
        time.sleep(0.5)
        before, now = now, handles()
    return now


def check_handles(before: dict[str, int]) -> None:
    """Fails unless this process comes to rest with no more handles than before."""
    left, deadline = at_rest(), time.monotonic() + 10
    while any(left[what] > before[what] for what in before) and time.monotonic() < deadline:
        left = at_rest()
    assert all(left[what] <= before[what] for what in before), f"{before} became {left}"


def operate(
    choice: random.Random, size: int, tensors: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
) -> object:
    one, many, other = tensors[choice.choice(list(tensors))]
    later = choice.random() < 0.5
    match choice.randrange(6):
        case 0:
            return dist.all_reduce(one, async_op=later)
        case 1:
            return dist.broadcast(one, choice.randrange(size), async_op=later)
        case 2:
            return dist.all_gather_into_tensor(many, one, async_op=later)
        case 3:
            return dist.reduce_scatter_tensor(one, many, async_op=later)
        case 4:
            return dist.all_to_all_single(other, many, async_op=later)
        case _:
            return dist.all_reduce(one.view(2, -1).t(), async_op=later)


def many_operations(rank: int, size: int) -> None:
    choice = random.Random(1)
    tensors = {
        count: (torch.zeros(count, device="cuda"), *torch.zeros(2, size * count, device="cuda"))
        for count in (2, 100, 3000)
    }
    warm = 500
    for number in range(warm + OPERATIONS):
        operate(choice, size, tensors)
        if number % 50 == 0:
            torch.cuda.synchronize()
        if number == warm:
            dist.barrier()
            held, memory, reserved = at_rest(), own_memory(), torch.cuda.memory_reserved()
    dist.barrier()
    check_handles(held)
    assert torch.cuda.memory_reserved() <= reserved
    grown = own_memory() - memory
    assert grown <= 8 << 20, f"{grown / (1 << 20):.1f} MB more after {OPERATIONS} operations"


def test_operations_leave_nothing(plain_world: World) -> None:
    plain_world.run(many_operations)


def many_communicators(rank: int, size: int) -> None:
    tensor = torch.ones(1000, device="cuda")
    for number in range(10 + COMMUNICATORS):
        group = dist.new_group()
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group, async_op=True)
        dist.destroy_process_group(group)
        if number == 9:
            torch.cuda.synchronize()
            dist.barrier()
            held, memory = at_rest(), own_memory()
    torch.cuda.synchronize()
    dist.barrier()
    check_handles(held)
    grown = own_memory() - memory
    assert grown <= COMMUNICATORS * (64 << 10) + (8 << 20), f"{grown / (1 << 20):.1f} MB more"


def test_communicators_leave_nothing(plain_world: World) -> None:
    plain_world.run(many_communicators)
