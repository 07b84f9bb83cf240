"""Random operations while ranks are killed, stopped, aborted or leave, at any stage; the survivors go on without them.

Every run prints its seed. `NCCLX_RS_CHAOS_FAULTS=1000 pytest tests/python/test_chaos.py` makes more of them, and
`NCCLX_RS_CHAOS_SEED` begins with another seed.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, HOSTS, MODES, World, fresh_store, leaving_together, set_timeout
from test_failures import names

FAULTS = int(os.environ.get("NCCLX_RS_CHAOS_FAULTS", "50"))
SEED = int(os.environ.get("NCCLX_RS_CHAOS_SEED", "1"))
# How long ranks wait for each other, where one may never come, and for an operation, which a stopped one never ends.
JOINING, OPERATION = timedelta(seconds=8), timedelta(seconds=4)
LARGEST = 300_000

# ---- operations, whose results are known ----


def data(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float64) % 1000 + rank


def all_reduce(me: int, size: int, count: int, root: int) -> bool:
    tensor = data(me, count)
    dist.all_reduce(tensor)
    return torch.equal(tensor, sum(data(rank, count) for rank in range(size)))


def broadcast(me: int, size: int, count: int, root: int) -> bool:
    tensor = data(me, count)
    dist.broadcast(tensor, root)
    return torch.equal(tensor, data(root, count))


def all_gather(me: int, size: int, count: int, root: int) -> bool:
    tensors = [torch.empty(count, dtype=torch.float64) for _ in range(size)]
    work = dist.all_gather(tensors, data(me, count), async_op=True)
    work.wait()
    return all(torch.equal(tensor, data(rank, count)) for rank, tensor in enumerate(tensors))


def reduce_scatter(me: int, size: int, count: int, root: int) -> bool:
    tensor = torch.empty(count, dtype=torch.float64)
    dist.reduce_scatter(tensor, [data(me + block, count) for block in range(size)])
    return torch.equal(tensor, sum(data(rank + me, count) for rank in range(size)))


def all_to_all(me: int, size: int, count: int, root: int) -> bool:
    tensors = [torch.empty(count, dtype=torch.float64) for _ in range(size)]
    dist.all_to_all(tensors, [data(100 * me + block, count) for block in range(size)])
    return all(torch.equal(tensor, data(100 * rank + me, count)) for rank, tensor in enumerate(tensors))


def ring(me: int, size: int, count: int, root: int) -> bool:
    received = torch.empty(count, dtype=torch.float64)
    after, before = (me + 1) % size, (me - 1) % size
    works = [dist.isend(data(me, count), after), dist.irecv(received, before)]
    for work in works:
        assert work is not None
        work.wait()
    return torch.equal(received, data(before, count))


def barrier(me: int, size: int, count: int, root: int) -> bool:
    dist.barrier()
    return True


OPERATIONS: list[Callable[[int, int, int, int], bool]] = [
    all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, ring, barrier
]  # fmt: skip


def operate(choice: random.Random, me: int, size: int, most: int | None) -> None:
    """The same random operations on every rank, without end if `most` says nothing else."""
    for _ in itertools.count() if most is None else range(most):
        operation, count = choice.choice(OPERATIONS), min(int(10 ** choice.uniform(0, 5.5)), LARGEST // size)
        assert operation(me, size, count, choice.randrange(size)), f"{operation.__name__} of {count}: wrong numbers"


# ---- faults ----


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    os._exit(3)


def abort() -> None:
    if dist.is_initialized():
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
    time.sleep(0.01)  # its own operations end meanwhile
    os._exit(4)


@dataclass(frozen=True)
class Fault:
    """What happens to whom, and when: while ranks join, amid operations, or while they leave."""

    victim: int
    happen: Callable[[], None]
    stage: str
    delay: float

    @staticmethod
    def random(members: list[int], choice: random.Random) -> Fault:
        stage = choice.choices(("joining", "operating", "leaving"), (1, 10, 2))[0]
        happen = choice.choices((kill, leave, abort, stop), (4, 2, 2, 1))[0]
        return Fault(choice.choice(members), happen, stage, choice.uniform(0, 0.05 if stage == "joining" else 0.3))


def one_generation(members: list[int], rank: int, fault: Fault, choice: random.Random) -> None:
    """The members join and operate until they have lost one, and those that are left know who it was."""
    me, size, lost = members.index(rank), len(members), members.index(fault.victim)
    pids = fresh_store()
    pids.set(str(rank), str(os.getpid()))
    timer = threading.Timer(fault.delay, fault.happen)
    try:
        if rank == fault.victim and fault.stage == "joining":
            timer.start()
        dist.init_process_group(BACKEND, store=fresh_store(), rank=me, world_size=size, timeout=JOINING)
        set_timeout(dist.group.WORLD, OPERATION.total_seconds())
        if rank == fault.victim and fault.stage == "operating":
            timer.start()
        operate(choice, me, size, 5 if fault.stage == "leaving" else None)
    except dist.DistError as error:
        told = f"{fault.happen.__name__} of rank {lost} of {size} while {fault.stage}: {error}"
        assert fault.stage != "leaving", told
        if rank == fault.victim:
            timer.join()
        assert re.search(names(lost), str(error)), told
    if rank == fault.victim:
        fault.happen()
    if dist.is_initialized():
        dist.destroy_process_group()
    if fault.happen is stop:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pids.get(str(fault.victim))), signal.SIGKILL)


def resources() -> tuple[int, int]:
    """How many file descriptors and threads this process has."""
    gc.collect()  # tracebacks hold works, and these the communicator's event poller
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def survive(rank: int, size: int, seed: int) -> None:
    """Loses all ranks but one, one after the other."""
    choice = random.Random(seed)
    members = list(range(size))
    before = None
    while len(members) > 1:
        fault = Fault.random(members, choice)
        one_generation(members, rank, fault, random.Random(choice.random()))
        members.remove(fault.victim)
        with leaving_together(members):
            pass
        before = before or resources()
    assert before is not None
    deadline = time.monotonic() + 10
    while resources()[0] > before[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    (files, threads), (files_then, threads_then) = resources(), before
    # The threads that call back stay: one, and one more for each time that all were busy.
    assert files <= files_then and threads <= threads_then + 2, f"{before} became {(files, threads)}"


def runs() -> Iterator[Any]:
    """Worlds and seeds, until there are enough faults."""
    choice, left = random.Random(SEED), FAULTS
    while left > 0:
        size, mode, seed = min(choice.choice((2, 3, 4, 8)), left + 1), choice.choice(MODES), choice.randrange(10**6)
        size = size if size in HOSTS else 4
        yield pytest.param(size, mode, seed, id=f"{size}-{mode}-{seed}")
        left -= size - 1


@pytest.mark.parametrize(("size", "mode", "seed"), runs())
def test_survivors_go_on(size: int, mode: str, seed: int) -> None:
    # PyTorch's own flight recorder, from 2.15 on, keeps a group that has failed until it records another.
    world = World(size, mode, variables={"TORCH_FR_BUFFER_SIZE": "0", "NCCLX_RS_FLIGHT_RECORDS": "2048"})
    survivor = [survivor_of(size, seed)]
    world.run(survive, seed, join=False, dies={rank for rank in range(size) if rank not in survivor})


def survivor_of(size: int, seed: int) -> int:
    """The rank that no fault happens to."""
    choice = random.Random(seed)
    members = list(range(size))
    while len(members) > 1:
        members.remove(Fault.random(members, choice).victim)
        choice.random()
    return members[0]
