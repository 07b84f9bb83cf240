"""Random operations while ranks are killed, stopped, aborted or leave, stores die and networks are cut, at any stage.

The survivors name the rank at fault, hold no more resources than before, and continue without the lost ranks. Every run
prints its seed. `NCCLX_RS_CHAOS_FAULTS=1000 pytest tests/python/test_chaos.py` makes more of them (`make chaos`), and
`NCCLX_RS_CHAOS_SEED` begins with another seed.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import (
    BACKEND,
    GROUP_TIMEOUT,
    MODES,
    PR_SET_PDEATHSIG,
    World,
    fresh_store,
    leaving_together,
    set_timeout,
)
from test_failures import names
from test_network import V4, Host, bring_up, ip, two_hosts

FAULTS = int(os.environ.get("NCCLX_RS_CHAOS_FAULTS", "50"))
SEED = int(os.environ.get("NCCLX_RS_CHAOS_SEED", "1"))
# Timeouts of joining, when a rank may never join, and of operations, which a stopped rank never ends.
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
    """The same random operations on every rank: `most` of them, or an endless number."""
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


def random_stage(choice: random.Random) -> str:
    """A random stage. Faults while ranks join are the rarest: the joined ranks then wait for the others."""
    return choice.choices(("joining", "operating", "leaving"), (1, 10, 2))[0]


@dataclass(frozen=True)
class Fault:
    """A fault, its rank and its stage: while ranks join, during operations, or while they leave."""

    victim: int
    happen: Callable[[], None]
    stage: str
    delay: float

    @staticmethod
    def random(members: list[int], choice: random.Random) -> Fault:
        stage = random_stage(choice)
        happen = choice.choices((kill, leave, abort, stop), (4, 2, 2, 1))[0]
        return Fault(choice.choice(members), happen, stage, choice.uniform(0, 0.05 if stage == "joining" else 0.3))


@dataclass(frozen=True)
class Generation:
    """Ranks that join twice: they may lose the store of the bootstrap, and then one of the ranks."""

    members: list[int]
    store: tuple[str, float] | None
    """When the store is lost: the stage, and how long after its beginning."""
    fault: Fault
    seed: float

    @property
    def faults(self) -> int:
        return 1 if self.store is None else 2


def generations(size: int, seed: int) -> Iterator[Generation]:
    """The generations of a world until one rank is left."""
    choice = random.Random(seed)
    members = list(range(size))
    while len(members) > 1:
        store = (random_stage(choice), choice.uniform(0, 0.1)) if choice.random() < 0.15 else None
        generation = Generation(list(members), store, Fault.random(members, choice), choice.random())
        yield generation
        members.remove(generation.fault.victim)


def one_generation(members: list[int], rank: int, fault: Fault, choice: random.Random) -> None:
    """The members join and operate until they have lost one; the survivors name the lost rank."""
    me, size, lost = members.index(rank), len(members), members.index(fault.victim)
    pids = fresh_store()
    pids.set(str(rank), str(os.getpid()))
    pids.wait([str(member) for member in members])
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
        if rank == fault.victim:
            timer.join()
        # A message times out because its peer may wait for the stopped rank in a collective.
        waits = fault.happen is stop and re.search("did not (send|receive) it", str(error))
        assert waits or re.search(names(lost), str(error)), told
    if rank == fault.victim:
        fault.happen()
    if dist.is_initialized():
        dist.destroy_process_group()
    if fault.happen is stop:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pids.get(str(fault.victim))), signal.SIGKILL)


def serve_store(port: int) -> None:
    """Serves a store in a forked process until it is killed; writes its port to the descriptor `port`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(port, 3)
    os.closerange(4, 65536)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(3, str(server.port).encode())
    signal.pause()


def mortal_store(me: int, size: int) -> tuple[dist.Store, Callable[[], None]]:
    """A store of all ranks, and the function by which rank 0 kills the process that serves it."""
    meeting = fresh_store()

    def end() -> None:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)

    if me == 0:
        reading, writing = os.pipe()
        server = os.fork()
        if server == 0:
            serve_store(writing)
        meeting.set("port", os.read(reading, 10).decode())
        os.close(reading)
        os.close(writing)
    store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), is_master=False, timeout=JOINING)
    meeting.set(str(me), "connected")
    meeting.wait([str(rank) for rank in range(size)])
    return store, end


def lose_store(members: list[int], rank: int, stage: str, delay: float, choice: random.Random) -> None:
    """The members lose the store of the bootstrap. After they have joined, nothing depends on it."""
    me, size = members.index(rank), len(members)
    store, end = mortal_store(me, size)
    timer = threading.Timer(delay, end)
    try:
        if me == 0 and stage == "joining":
            timer.start()
        dist.init_process_group(BACKEND, store=store, rank=me, world_size=size, timeout=JOINING)
        set_timeout(dist.group.WORLD, GROUP_TIMEOUT)
        if me == 0 and stage == "operating":
            timer.start()
        operate(choice, me, size, 100)
    except dist.DistError as error:
        told = f"loss of the store while {stage}, {size} ranks: {error}"
        # The ranks that reached the store in time wait for the others.
        assert stage == "joining" and re.search(r"(?i)store|rank", str(error)), told
    with leaving_together(members):
        if me == 0 and stage == "leaving":
            end()
    if dist.is_initialized():
        dist.destroy_process_group()
    if me == 0 and stage != "leaving":
        timer.join()


def resources() -> tuple[int, int]:
    """The numbers of this process's file descriptors and threads."""
    gc.collect()  # tracebacks hold works, and works hold the communicator's event poller
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def survive(rank: int, size: int, seed: int) -> None:
    """Loses all ranks but one, one after the other."""
    before = None
    for generation in generations(size, seed):
        members, choice = generation.members, random.Random(generation.seed)
        if generation.store is not None:
            lose_store(members, rank, *generation.store, choice)
        one_generation(members, rank, generation.fault, choice)
        with leaving_together([member for member in members if member != generation.fault.victim]):
            pass
        before = before or resources()
    assert before is not None
    check_resources(before)


# What a process keeps once it has needed it: a thread that calls back, and one that hands records to Python's logging.
KEPT_THREADS = 2


def check_resources(before: tuple[int, int]) -> None:
    """Fails unless this process soon has no more resources than `before`."""
    deadline, now = time.monotonic() + 10, resources()
    while (now[0] > before[0] or now[1] > before[1] + KEPT_THREADS) and time.monotonic() < deadline:
        time.sleep(0.05)
        now = resources()
    assert now[0] <= before[0] and now[1] <= before[1] + KEPT_THREADS, f"{before} became {now}"


CUTS = max(2, FAULTS // 25)
"""How many faults are cuts of the network."""


def runs() -> Iterator[Any]:
    """Worlds and seeds for enough faults."""
    choice, left, modes = random.Random(SEED), FAULTS - CUTS, itertools.cycle(MODES)
    while left > 0:
        size, mode, seed = min(choice.randint(2, 8), left + 1), next(modes), choice.randrange(10**6)
        yield pytest.param(size, mode, seed, id=f"{size}-{mode}-{seed}")
        left -= sum(generation.faults for generation in generations(size, seed))


@pytest.mark.parametrize(("size", "mode", "seed"), runs())
def test_survivors_go_on(size: int, mode: str, seed: int, tmp_path: Path) -> None:
    world = World(size, mode, variables={"TMPDIR": str(tmp_path)})
    world.run(survive, seed, join=False, dies={generation.fault.victim for generation in generations(size, seed)})
    left = [*tmp_path.iterdir(), *Path("/dev/shm").glob("*ncclx*")]
    assert not left, left


# ---- cuts of the network ----


def lose_each_other(rank: int, size: int, namespaces: tuple[str, ...], seed: int, cuts: int) -> None:
    """Cuts even ranks off from odd ones: each side names the lost ranks, continues, and joins them again."""
    choice = random.Random(seed)
    sides = [[r for r in range(size) if r % 2 == side] for side in (0, 1)]
    own, other = sides[rank % 2], sides[1 - rank % 2]
    before = None
    for cut in range(cuts):
        stage, delay = random_stage(choice), choice.uniform(0, 0.2)
        timer = threading.Timer(delay, ip, ("-n", namespaces[0], "link", "set", "wire0", "down"))
        together, alone = random.Random(choice.random()), random.Random(choice.random())
        try:
            if rank == 0 and stage == "joining":
                timer.start()
            dist.init_process_group(BACKEND, store=fresh_store(), rank=rank, world_size=size, timeout=JOINING)
            set_timeout(dist.group.WORLD, OPERATION.total_seconds())
            if rank == 0 and stage == "operating":
                timer.start()
            operate(together, rank, size, 5 if stage == "leaving" else None)
        except dist.DistError as error:
            told = f"cut {cut} while {stage}, on the side of {own}: {error}"
            assert stage != "leaving" and any(re.search(names(r), str(error)) for r in other), told
        with leaving_together():
            if rank == 0 and stage == "leaving":
                timer.start()
        if dist.is_initialized():
            dist.destroy_process_group()
        with leaving_together():
            if rank == 0:
                timer.join()
        store = dist.PrefixStore(str(rank % 2), fresh_store())
        dist.init_process_group(BACKEND, store=store, rank=own.index(rank), world_size=len(own), timeout=JOINING)
        operate(alone, own.index(rank), len(own), 20)
        dist.destroy_process_group()
        with leaving_together():
            if rank == 0:
                bring_up("wire0", namespaces)
        before = before or resources()
    assert before is not None
    check_resources(before)


def cut_runs() -> Iterator[Any]:
    """Worlds, numbers of cuts and seeds for enough cuts."""
    choice = random.Random(SEED)
    for done in range(0, CUTS, 5):
        size, cuts, seed = choice.randint(2, 8), min(5, CUTS - done), choice.randrange(10**6)
        yield pytest.param(size, cuts, seed, id=f"{size}-{cuts}-{seed}")


@pytest.mark.parametrize(("size", "cuts", "seed"), cut_runs())
def test_sides_of_a_cut_go_on(size: int, cuts: int, seed: int) -> None:
    with two_hosts(V4) as namespaces:
        setup = Host(namespaces)
        world = World(size, "tcp", {"NCCLX_RS_PEER_TIMEOUT_SECONDS": "3"}, setup)
        try:
            world.run(lose_each_other, namespaces, seed, cuts, join=False)
        finally:
            world.close()
