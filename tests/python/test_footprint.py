"""The costs of a communicator besides its operations: memory, and processor time while it is idle."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Sequence
from typing import Any

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, descriptors

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="other backends make no such promise")

# How long to measure the processor time, in seconds.
WATCHED = 1.0
# For so long the others wait for a rank, less what the system has them begin late.
LATE = 2.0


def own_memory() -> int:
    """Bytes of memory without a file behind it (proc_pid_smaps(5), Anonymous), and half of what it shares with one
    other rank, also where neither has touched it.

    What it has from the server that it was forked from counts all the time. Measures that tell who else has a page
    (Pss, Private_Dirty) would change with every process that comes or goes, and as Python counts references.
    """
    ctypes.CDLL(None).malloc_trim(0)  # or what is taken next would come from what is free
    own, shared, name = 0, dict[str, int](), ""
    with open("/proc/self/smaps") as lines:
        for words in (line.split() for line in lines):
            if words[0] == "Anonymous:" and not name:
                own += int(words[1]) << 10
            elif "-" in words[0]:
                name = words[4] if "/memfd:ncclx_rs" in words else ""
                if name:
                    first, last = (int(address, 16) for address in words[0].split("-"))
                    shared[name] = max(shared.get(name, 0), int(words[2], 16) + last - first)
    return own + sum(shared.values()) // 2


def talk_to_all(groups: Sequence[Any], size: int) -> None:
    """One short and one long exchange with every rank in each group, so that all streams are open.

    All of them use the same tensors: freed ones would leave holes between what the communicators allocate.
    """
    data = torch.ones(size << 16)
    result = torch.empty_like(data)
    for group in groups:
        for count in (size, size << 16):
            dist.all_to_all_single(result[:count], data[:count], group=group)


def memory_is_bounded(rank: int, size: int) -> None:
    talk_to_all([dist.group.WORLD], size)  # what each process makes once
    gc.collect()
    dist.barrier()
    before = own_memory()
    dist.barrier()
    groups = [dist.new_group(backend=BACKEND) for _ in range(4)]
    talk_to_all(groups, size)
    gc.collect()
    dist.barrier()
    each = torch.tensor([(own_memory() - before) / len(groups)])
    dist.all_reduce(each)
    mean = each.item() / size
    assert mean <= 4 << 20, f"a communicator takes {mean / (1 << 20):.1f} MB a rank"


def settled() -> None:
    """Waits until this process has opened no file for a second: the failure detector connects by itself."""
    counts = [-1]
    while len(counts) < 11 or len(set(counts[-10:])) > 1:
        time.sleep(0.1)
        counts.append(descriptors())


def further_groups_take_little(rank: int, size: int) -> None:
    count = 32
    first = dist.new_group(backend=BACKEND)
    talk_to_all([dist.group.WORLD, first], size)  # what each process makes once
    settled()
    dist.barrier()
    before, memory = descriptors(), own_memory()
    dist.barrier()
    groups = [dist.new_group(backend=BACKEND) for _ in range(count)]
    made = descriptors(before + 3 * count)
    each = (own_memory() - memory) / count
    talk_to_all(groups, size)
    used = descriptors(before + (3 + 2 * (size - 1)) * count)
    # A poller of two and a listener; then a stream each way for each peer.
    assert made <= before + 3 * count, (before, made)
    assert used <= before + (3 + 2 * (size - 1)) * count, (before, made, used)
    mean = torch.tensor([each])
    dist.all_reduce(mean)
    assert mean.item() / size < 64 << 10, f"a group takes {mean.item() / size / 1024:.0f} KiB a rank before it is used"


def what_ranks_copy_takes_bounded_memory(rank: int, size: int) -> None:
    data = torch.ones(30_000_000)  # 120 MB

    def taken(**hints: str) -> int:
        """What a reduce has left to a rank's communicator."""
        group = dist.new_group(backend=BACKEND, pg_options=ncclx_rs.Options(hints=hints))
        dist.reduce(data[:size], 0, group=group)
        data.fill_(rank + 1)
        before = own_memory()
        dist.reduce(data, 0, group=group)
        after = own_memory()
        if rank == 0:
            assert torch.equal(data, torch.full_like(data, size * (size + 1) / 2))
        dist.barrier()
        dist.destroy_process_group(group)
        return after - before

    # Rank 0's setting holds for all.
    bounded, whole = taken(scratch_bytes=str(1 << 20 if rank == 0 else 1 << 30)), taken(scratch_bytes=str(1 << 30))
    by_default = taken()
    # What is not made piece by piece is given back.
    group = dist.new_group(backend=BACKEND, pg_options=ncclx_rs.Options(hints={"algorithm": "binomial"}))
    part = data[: data.numel() // size]
    blocks = [torch.ones_like(part) for _ in range(size)] if rank == 0 else None
    before = own_memory()
    dist.gather(part, blocks, group=group)
    given_back = own_memory() - before
    assert given_back < 16 << 20, given_back
    if rank != 0:
        assert bounded < 8 << 20 and by_default < 16 << 20 and whole > 100 << 20, (bounded, by_default, whole)


def idle_ranks_use_no_processor(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(100), async_op=True).wait()
    talk_to_all([dist.group.WORLD], size)
    # An open window is no operation in flight.
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    window = backend._window_register(torch.zeros(1000))
    backend._window_put(window, torch.ones(1000), (rank + 1) % size, 0)
    backend._window_signal(window, (rank + 1) % size)
    backend._window_wait_signal(window, (rank - 1) % size)
    time.sleep(0.1)  # until the last poll is over
    used = time.process_time()
    time.sleep(WATCHED)
    used = time.process_time() - used
    backend._window_deregister(window)
    assert used <= WATCHED * 0.01, f"{used:.3f} s of {WATCHED:g} s"


def waiting_ranks_sleep(rank: int, size: int, later: bool) -> None:
    def reduce() -> None:
        work = dist.all_reduce(torch.ones(1000), async_op=later)
        if work is not None:
            work.wait()

    talk_to_all([dist.group.WORLD], size)
    reduce()  # loading at a first call would take a slow machine longer than the limit
    dist.barrier()
    if rank == 0:
        time.sleep(LATE)  # the rank that is late
    used, began = time.process_time(), time.monotonic()
    reduce()
    used, took = time.process_time() - used, time.monotonic() - began
    if rank != 0:
        assert took >= LATE * 0.25, f"rank 0 was late for {took:.1f} s only"
        assert used <= took * 0.05, f"{used:.3f} s of {took:.1f} s"


@pytest.mark.worlds(sizes=(8,), modes=("shm", "tcp"))
def test_memory(world: World) -> None:
    world.run(memory_is_bounded)


@pytest.mark.worlds(sizes=(2, 8), modes=("shm", "tcp"))
def test_further_groups(fresh_world: World) -> None:
    fresh_world.run(further_groups_take_little)


@pytest.mark.worlds(sizes=(2, 3), modes=("shm",))
def test_copies(fresh_world: World) -> None:
    fresh_world.run(what_ranks_copy_takes_bounded_memory)


@pytest.mark.worlds(sizes=(2,), modes=("shm", "tcp"))
def test_idle(fresh_world: World) -> None:
    # Fresh workers: after a test of gloo groups, a thread of gloo polls a hundred times a second for ever.
    fresh_world.run(idle_ranks_use_no_processor)


@pytest.mark.worlds(sizes=(3,), modes=("shm", "tcp"))
@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_waiting(fresh_world: World, later: bool) -> None:
    fresh_world.run(waiting_ranks_sleep, later)
