"""Ranks are killed, stopped, aborted or leave while streams of the others wait for them.

The survivors name the rank at fault, their streams run out, they hold no more than before, and go on without it. Every
run prints its seed. `make chaos-cuda` makes more faults: FAULTS and SEED change that.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import begin
from harness import BACKEND, World, fresh_store, leaving_together, set_timeout
from test_chaos import data, kill, leave, stop
from test_cuda_footprint import at_rest, check_handles
from test_failures import names

FAULTS = int(os.environ.get("NCCLX_RS_CHAOS_FAULTS", "10"))
SEED = int(os.environ.get("NCCLX_RS_CHAOS_SEED", "1"))
JOINING, OPERATION, WATCHDOG = timedelta(seconds=20), timedelta(seconds=4), timedelta(seconds=60)
LARGEST = 30_000

# An operation begins, and gives what to compare with what once it has ended.
Begun = tuple[dist.Work, torch.Tensor, torch.Tensor]


def all_reduce(me: int, size: int, count: int, root: int) -> Begun:
    tensor = data(me, count).cuda()
    work = dist.all_reduce(tensor, async_op=True)
    return work, tensor, sum(data(rank, count) for rank in range(size))


def broadcast(me: int, size: int, count: int, root: int) -> Begun:
    tensor = data(me, count).cuda()
    return dist.broadcast(tensor, root, async_op=True), tensor, data(root, count)


def all_gather(me: int, size: int, count: int, root: int) -> Begun:
    tensor = torch.empty(size * count, dtype=torch.float64, device="cuda")
    work = dist.all_gather_into_tensor(tensor, data(me, count).cuda(), async_op=True)
    return work, tensor, torch.cat([data(rank, count) for rank in range(size)])


def reduce_scatter(me: int, size: int, count: int, root: int) -> Begun:
    tensor = torch.empty(count, dtype=torch.float64, device="cuda")
    blocks = torch.cat([data(me + block, count) for block in range(size)]).cuda()
    return (
        dist.reduce_scatter_tensor(tensor, blocks, async_op=True),
        tensor,
        sum(data(r + me, count) for r in range(size)),
    )


def all_to_all(me: int, size: int, count: int, root: int) -> Begun:
    tensor = torch.empty(size * count, dtype=torch.float64, device="cuda")
    blocks = torch.cat([data(100 * me + block, count) for block in range(size)]).cuda()
    work = dist.all_to_all_single(tensor, blocks, async_op=True)
    return work, tensor, torch.cat([data(100 * rank + me, count) for rank in range(size)])


OPERATIONS: list[Callable[[int, int, int, int], Begun]] = [
    all_reduce,
    broadcast,
    all_gather,
    reduce_scatter,
    all_to_all,
]


def operate(choice: random.Random, me: int, size: int) -> None:
    """The same random operations on every rank, several at a time, for ever."""
    while True:
        begun = []
        for _ in range(choice.randint(1, 5)):
            operation, count = choice.choice(OPERATIONS), min(int(10 ** choice.uniform(0, 4.5)), LARGEST // size)
            begun.append((operation.__name__, count, *operation(me, size, count, choice.randrange(size))))
        for name, count, work, result, expected in begun:
            work.wait(WATCHDOG)
            assert torch.equal(result.cpu(), expected), f"{name} of {count}: wrong numbers"


def abort() -> None:
    """Aborts the group while its own streams may wait, and is gone."""
    dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")).abort()
    os._exit(4)


@dataclass(frozen=True)
class Fault:
    """What happens to which rank: while ranks set the device up, or so long after the first operation."""

    victim: int
    happen: Callable[[], None]
    first: bool
    delay: float
    seed: float


def faults(size: int, seed: int) -> Iterator[tuple[list[int], Fault]]:
    """The faults of a world until one rank is left, and who is there then."""
    choice = random.Random(seed)
    members = list(range(size))
    while len(members) > 1:
        happen = choice.choices((kill, leave, abort, stop), (4, 2, 3, 2))[0]
        first = happen is not abort and choice.random() < 0.2
        yield (
            list(members),
            (fault := Fault(choice.choice(members), happen, first, choice.uniform(0, 0.3), choice.random())),
        )
        members.remove(fault.victim)


def one_fault(members: list[int], rank: int, fault: Fault) -> None:
    me, size, lost = members.index(rank), len(members), members.index(fault.victim)
    pids, choice = fresh_store(), random.Random(fault.seed)
    pids.set(str(rank), str(os.getpid()))
    dist.init_process_group(BACKEND, store=fresh_store(), rank=me, world_size=size, timeout=JOINING)
    set_timeout(dist.group.WORLD, OPERATION.total_seconds())
    timer = threading.Timer(fault.delay, fault.happen)
    timer.daemon = True
    try:
        if rank == fault.victim and fault.first:
            timer.start()
        all_reduce(me, size, 1, 0)[0].wait(WATCHDOG)
        if rank == fault.victim and not fault.first:
            timer.start()
        operate(choice, me, size)
    except (dist.DistError, RuntimeError) as error:
        if rank == fault.victim:
            threading.Event().wait()  # what happens to it may not have happened yet
        told = f"{fault.happen.__name__} of rank {lost} of {size}, seed {fault.seed}: {error}"
        assert re.search(names(lost), str(error)), told
    # No stream waits for ever.
    torch.cuda.synchronize()
    dist.destroy_process_group()
    if fault.happen is stop:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pids.get(str(fault.victim))), signal.SIGKILL)


def survive(rank: int, size: int, seed: int) -> None:
    before = None
    for members, fault in faults(size, seed):
        one_fault(members, rank, fault)
        with leaving_together([member for member in members if member != fault.victim]):
            pass
        if before is None:
            before = at_rest()
            # PyTorch keeps those with which it waits for streams that used memory of another.
            del before["event"]
    assert before is not None
    check_handles(before)


def runs() -> Iterator[Any]:
    choice, left = random.Random(SEED), FAULTS
    while left > 0:
        size, devices, seed = min(choice.randint(2, 5), left + 1), choice.randint(1, 2), choice.randrange(10**6)
        yield pytest.param(size, devices, seed, id=f"{size}-on-{devices}-{seed}")
        left -= size - 1


@pytest.mark.parametrize(("size", "devices", "seed"), runs())
def test_survivors_go_on(size: int, devices: int, seed: int) -> None:
    variables = {"SOFTCUDA_DEVICES": str(devices), "SOFTCUDA_DELAY_US": "200", "SOFTCUDA_WEAK": "1"}
    world = World(size, "shm", variables, begin)
    world.run(survive, seed, join=False, dies={fault.victim for _, fault in faults(size, seed)})
