"""Threads of a rank that share long copies and reductions (`NCCLX_RS_THREADS`)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World
from torch.utils.data import DataLoader, IterableDataset

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="a setting of this package")

# Of four MiB, and a length that no number of threads divides.
COUNT = (1 << 20) + 7


def team() -> list[str]:
    """The threads of this process that share work, by the numbers that the system gives them."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names[task.name] = (task / "comm").read_text()
    return sorted(number for number, name in names.items() if name.startswith("ncclx_rs team"))


def long_operations_are_shared(rank: int, size: int, threads: int) -> None:
    assert team() == [], "none before they are needed"
    dist.all_reduce(torch.ones(8))
    assert team() == [], "none for short messages"
    mine = torch.arange(COUNT, dtype=torch.float32) + rank
    total, blocks = mine.clone(), torch.empty(size, COUNT)
    dist.all_reduce(total)
    dist.all_gather_into_tensor(blocks, mine)
    dist.broadcast(mine, 1)
    each = torch.arange(COUNT, dtype=torch.float32)
    assert total.equal(each * size + size * (size - 1) // 2)
    assert blocks.equal(torch.stack([each + other for other in range(size)]))
    assert mine.equal(each + 1)
    # A thread bears its name once it runs. Until then, the others do its part.
    deadline = time.monotonic() + 30
    while len(team()) < threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(team()) == threads


def test_a_long_operation_is_shared_by_as_many_threads_as_the_setting_says() -> None:
    for threads in (0, 2):
        world = World(2, "shm", variables={"NCCLX_RS_THREADS": str(threads)})
        try:
            world.run(long_operations_are_shared, threads)
        finally:
            world.close()


class Settings(IterableDataset[str]):
    """What a worker's group has been told of threads."""

    def __iter__(self) -> Iterator[str]:
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        yield os.environ.get("NCCLX_RS_THREADS", "")


@pytest.mark.parametrize("variable", [None, "3"])
def test_a_worker_that_loads_data_has_none_unless_told(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    monkeypatch.delenv("NCCLX_RS_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("NCCLX_RS_THREADS", variable)
    loader = DataLoader(Settings(), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert list(loader) == [variable or "0"]
    assert os.environ.get("NCCLX_RS_THREADS") == variable
