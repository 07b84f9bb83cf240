"""Runs a function on every rank of a world of worker processes.

    world = World(size=2, mode="tcp")
    world.run(check_all_reduce, 1023)     # calls check_all_reduce(rank, size, 1023) in each worker
    world.close()

Workers are forked from a server that has torch loaded and are reused from run to run; each run gets a fresh process
group. Functions travel by reference, so they must live at the top level of a module. When a rank fails, dies or hangs,
the run fails with every rank's traceback, stack and output, and the workers are replaced.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import functools
import gc
import importlib
import importlib.util
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

BACKEND = os.environ.get("NCCLX_RS_TEST_BACKEND", "ncclx_rs")
GROUP_TIMEOUT = 30.0
WATCHDOG_SECONDS = float(os.environ.get("NCCLX_RS_TEST_WATCHDOG", "240"))
# How long the other ranks may take to report after one of them has failed.
GRACE_SECONDS = 3.0

PR_SET_PDEATHSIG = 1
# What a worker and the tests' process tell each other before a run.
READY = "ready"

MODES = ("shm", "tcp", "hier", "ucx")
# What UCX goes through in mode "ucx", by the size of the world: each of its ways in one.
UCX_WAYS = {2: "posix,cma", 3: "tcp"}
# The pretended host of each rank in mode "hier". With three ranks, the hosts' ranks are not contiguous.
HOSTS = {2: "ab", 3: "aba", 4: "aabb", 5: "aabbb", 6: "aaabbb", 7: "aaabbbb", 8: "aaaabbbb"}


def two_nodes(root: Path) -> None:
    """Has the folder tell, as `/` does, of NUMA nodes 0 and 2 with CPUs and of node 3 with memory alone."""
    folder = root / "sys/devices/system/node"
    folder.mkdir(parents=True)
    (folder / "online").write_text("0,2-3\n")
    for number, cpus, distance in ((0, "0-3", "10 21 17"), (2, "4-5,8-11", "31 10 28")):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}/cpulist").write_text(f"{cpus}\n")
        (folder / f"node{number}/distance").write_text(f"{distance}\n")


def lacking(what: str) -> NoReturn:
    """Skips a test because the machine lacks something; in CI (``NCCLX_RS_CI``) the test fails instead."""
    if os.environ.get("NCCLX_RS_CI") == "1":
        pytest.fail(f"CI lacks what the test needs: {what}")
    pytest.skip(what, allow_module_level=True)


def needs(module: str, why: str) -> None:
    """Skips the test or its file unless a module can be imported; see ``lacking``."""
    if importlib.util.find_spec(module) is None:
        lacking(why)


def has_cuda_driver() -> bool:
    """Whether a CUDA driver can be loaded; it is not initialised, so that processes may still fork."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# Of a test of what a machine without a GPU says.
without_cuda_driver = pytest.mark.skipif(has_cuda_driver(), reason="this machine has a CUDA driver")


def environment(mode: str, rank: int, size: int) -> dict[str, str]:
    """The environment variables that put a worker into a transport mode."""
    if mode == "hier":
        # Without single copies: long messages go through the ring within a host too.
        return {"NCCLX_RS_HOST_ID": HOSTS[size][rank], "NCCLX_RS_SINGLE_COPY_BYTES": "0"}
    if mode == "ucx":
        return {"NCCLX_RS_TRANSPORT": mode, "UCX_TLS": UCX_WAYS.get(size, "posix,cma,tcp")}
    return {"NCCLX_RS_TRANSPORT": mode}


@dataclass(frozen=True)
class Task:
    """One rank's part of a run."""

    module: str
    function: str
    args: tuple[Any, ...]
    prefix: str
    timeout: float
    join: bool


@dataclass
class Outcome:
    """The outcome of one rank's part of a run."""

    kind: str = "hung"  # hung, died, failed, skipped, done
    detail: str = ""
    value: Any = None


@dataclass
class WorkerState:
    """A worker's rank, world and stores."""

    rank: int
    size: int
    store_port: int
    task: Task | None = None
    groups: int = field(default=0)
    store: dist.TCPStore | None = None


this_worker: WorkerState | None = None


def descriptors(most: int | None = None) -> int:
    """How many files this process has open; waits up to 10 s for what is still being closed, until there are `most`."""
    gc.collect()
    deadline = time.monotonic() + 10
    while (count := len(os.listdir("/proc/self/fd"))) > (count if most is None else most):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return count


def stop(process: int) -> None:
    """Stops a process, and waits until all its threads stand still: a signal alone is for one of them to see."""
    os.kill(process, signal.SIGSTOP)
    states = [""]
    while any(state != "T" for state in states):
        time.sleep(0.001)
        states = []
        for thread in Path(f"/proc/{process}/task").glob("*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                states.append(thread.read_text().rpartition(")")[2].split()[0])


def fresh_store() -> dist.Store:
    """A store that the ranks of this run share. The n-th call on each rank returns the same store."""
    assert this_worker is not None and this_worker.task is not None, "only workers have a store"
    this_worker.groups += 1
    store = connected_store()
    store.set_timeout(datetime.timedelta(seconds=60))
    return dist.PrefixStore(f"{this_worker.task.prefix}/{this_worker.groups}", store)


def connected_store() -> dist.TCPStore:
    """This worker's connection to the store of all runs. A worker must make it before it moves to another network."""
    assert this_worker is not None
    if this_worker.store is None:
        # One connection for all runs: PyTorch looks up the name of each connection's peer, and some networks take
        # seconds to answer that there is none.
        this_worker.store = dist.TCPStore("127.0.0.1", this_worker.store_port, is_master=False)
    return this_worker.store


def join(
    timeout: float | None = None,
    backend: str | None = None,
    store: dist.Store | None = None,
    join_timeout: float = GROUP_TIMEOUT,
) -> None:
    """Makes the default group of this run on the backend under test.

    Args:
        timeout: the timeout of operations in seconds; the run's if not given.
        backend: another backend.
        store: the store of the ranks; a fresh store if not given.
        join_timeout: the timeout of joining, which takes seconds on a loaded machine.
    """
    assert this_worker is not None and this_worker.task is not None, "only workers join groups"
    limit = this_worker.task.timeout if timeout is None else timeout
    dist.init_process_group(
        BACKEND if backend is None else backend,
        store=fresh_store() if store is None else store,
        rank=this_worker.rank,
        world_size=this_worker.size,
        timeout=datetime.timedelta(seconds=join_timeout),
    )
    if limit != join_timeout:
        set_timeout(dist.group.WORLD, limit)


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Sets a group's timeout for operations."""
    limit = datetime.timedelta(seconds=seconds)
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(limit, group)
    else:
        group.set_timeout(limit)


@contextmanager
def joined(timeout: float | None = None, backend: str | None = None, store: dist.Store | None = None) -> Iterator[None]:
    """The default group during a block."""
    join(timeout, backend, store)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def leaving_together(ranks: Collection[int] | None = None) -> Iterator[None]:
    """Keeps each of `ranks` (default: all) alive and in its group until all of them have left the block."""
    assert this_worker is not None
    store = fresh_store()
    try:
        yield
    finally:
        _meet_at(store, ranks)


def meet(ranks: Collection[int] | None = None) -> None:
    """Waits until `ranks` (default: all) are here, by the store, so that nothing between them is under way any more.

    A rank that has passed a barrier may leave while another one is still in it.
    """
    _meet_at(fresh_store(), ranks)


def _meet_at(store: dist.Store, ranks: Collection[int] | None) -> None:
    assert this_worker is not None
    everyone = range(this_worker.size) if ranks is None else ranks
    store.set(f"through{this_worker.rank}", "yes")
    store.wait([f"through{rank}" for rank in everyone], datetime.timedelta(seconds=WATCHDOG_SECONDS))


def _perform(task: Task) -> Outcome:
    assert this_worker is not None
    this_worker.task, this_worker.groups = task, 0
    # PyTorch numbers a rank's groups. After a failure on one rank alone, the ranks' numbers would differ.
    dist.distributed_c10d._world.group_count = 0
    try:
        function = getattr(importlib.import_module(task.module), task.function)
        with joined() if task.join else _unjoined():
            value = function(this_worker.rank, this_worker.size, *task.args)
    except pytest.skip.Exception as reason:
        return Outcome("skipped", str(reason))
    except BaseException:
        return Outcome("failed", traceback.format_exc())
    return Outcome("done", value=value)


@contextmanager
def _unjoined() -> Iterator[None]:
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _serve(
    connection: multiprocessing.connection.Connection,
    rank: int,
    size: int,
    variables: dict[str, str],
    log: str,
    store_port: int,
    setup: Callable[[int], None] | None,
) -> None:
    """The main function of a worker."""
    global this_worker
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a hung worker must not outlive the tests
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr, all_threads=True)
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    os.environ.update(variables)
    gc.freeze()  # the server's objects stay: a collection that examines them takes 0.2 s
    torch.set_num_threads(1)
    this_worker = WorkerState(rank, size, store_port)
    if setup is not None:
        setup(rank)
    while True:
        try:
            task = connection.recv()
            # To import takes a new worker seconds; what fails here fails again in a moment.
            with suppress(Exception, pytest.skip.Exception):
                importlib.import_module(task.module)
            connection.send(READY)
            connection.recv()
        except EOFError:
            return
        connection.send(_perform(task))


@functools.cache
def _fork_server() -> Any:
    context = multiprocessing.get_context("forkserver")
    # Loaded once for all workers: PyTorch's compiler alone takes seconds.
    context.set_forkserver_preload(["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "pytest"])
    return context


@functools.cache
def _store_server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


_run_numbers = itertools.count()


class World:
    """A set of worker processes, one for each rank."""

    def __init__(
        self,
        size: int,
        mode: str,
        variables: dict[str, str] | None = None,
        setup: Callable[[int], None] | None = None,
    ) -> None:
        """Describes the world; its workers start with the first run.

        Args:
            size: The number of ranks.
            mode: One of `MODES`.
            variables: More environment variables for the workers.
            setup: Called with the rank in each worker before its first run.
        """
        if mode == "ucx":
            needs("libucx", "UCX: the Python package libucx-cu12")
        self.size = size
        self.mode = mode
        self._variables = variables or {}
        self._setup = setup
        self._workers: list[Any] = []
        self._connections: list[multiprocessing.connection.Connection] = []
        self._logs: list[Path] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        join: bool = True,
        timeout: float = GROUP_TIMEOUT,
        dies: Collection[int] = (),
    ) -> list[Any]:
        """Calls `function(rank, size, *args)` on every rank and returns what each returned.

        Args:
            function: A function at the top level of a module.
            args: Further arguments, picklable.
            join: Whether to make the default process group first.
            timeout: The process group's timeout in seconds.
            dies: The ranks that are expected to die during the run; their result is None.
        """
        self._start()
        task = Task(function.__module__, function.__qualname__, args, f"run{next(_run_numbers)}", timeout, join)
        offsets = [log.stat().st_size if log.exists() else 0 for log in self._logs]
        for connection in self._connections:
            connection.send(task)
        self._begin_together()
        outcomes = self._collect(dies)
        wrong = [r for r, o in enumerate(outcomes) if (o.kind == "died") != (r in dies) or o.kind in ("failed", "hung")]
        if wrong or dies:
            report = self._report(task, outcomes, offsets)
            self.close()
            if wrong:
                pytest.fail(report, pytrace=False)
        for outcome in outcomes:
            if outcome.kind == "skipped":
                pytest.skip(outcome.detail)
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Ends the workers."""
        for connection in self._connections:
            connection.close()
        for worker in self._workers:
            worker.join(timeout=GRACE_SECONDS)
            if worker.is_alive():
                worker.kill()
                worker.join()
        for log in self._logs:
            log.unlink(missing_ok=True)
        self._workers, self._connections, self._logs = [], [], []

    def _start(self) -> None:
        if self._workers:
            return
        port = _store_server().port
        for rank in range(self.size):
            ours, theirs = _fork_server().Pipe()
            handle, log = tempfile.mkstemp(prefix=f"rank{rank}-", suffix=".log")
            os.close(handle)
            variables = environment(self.mode, rank, self.size) | self._variables
            args = (theirs, rank, self.size, variables, log, port, self._setup)
            worker = _fork_server().Process(target=_serve, args=args, daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._connections.append(ours)
            self._logs.append(Path(log))

    def _begin_together(self) -> None:
        """Lets the ranks begin once all have loaded what they run; who dies before that is for `_collect` to tell."""
        for told in (False, True):
            for connection in self._connections:
                with suppress(EOFError, ConnectionError):
                    if told:
                        connection.send(READY)
                    elif connection.poll(WATCHDOG_SECONDS):
                        connection.recv()

    def _collect(self, dies: Collection[int]) -> list[Outcome]:
        outcomes = [Outcome() for _ in range(self.size)]
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + WATCHDOG_SECONDS
        while waiting and time.monotonic() < deadline:
            for ready in multiprocessing.connection.wait(list(waiting), timeout=deadline - time.monotonic()):
                rank = waiting.pop(ready)
                try:
                    outcomes[rank] = ready.recv()
                except (EOFError, ConnectionResetError):
                    self._workers[rank].join(timeout=GRACE_SECONDS)
                    outcomes[rank] = Outcome("died", f"exit code {self._workers[rank].exitcode}")
                unexpected = outcomes[rank].kind == "failed" or (outcomes[rank].kind == "died" and rank not in dies)
                if unexpected:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        hung = [self._workers[rank] for rank in waiting.values()]
        for worker in hung:
            os.kill(worker.pid, signal.SIGUSR1)
        if hung:
            time.sleep(1.0)  # faulthandler writes the stacks to the logs
        for worker in hung:
            worker.kill()
        return outcomes

    def _report(self, task: Task, outcomes: list[Outcome], offsets: list[int]) -> str:
        lines = [f"{task.module}.{task.function} on {self.size} ranks over {self.mode}, backend {BACKEND}"]
        for rank, outcome in enumerate(outcomes):
            lines.append(f"---- rank {rank}: {outcome.kind} {outcome.detail.strip()}")
            with self._logs[rank].open("rb") as log:
                log.seek(offsets[rank])
                output = log.read()[-20_000:].decode(errors="replace").strip()
            if output:
                lines.append(f"---- rank {rank} printed:\n{output}")
        return "\n".join(lines)
