"""Starts the ranks of a world on this host, or joins the world of a launcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessContext, start_processes

from ncclx_rs.bench import measure

# How often to check whether a rank has died, in seconds.
_CHECK_INTERVAL = 0.5
_JOIN_TIMEOUT = timedelta(seconds=120)

Found = TypeVar("Found", covariant=True)


def launched() -> bool:
    """Whether torchrun, or another launcher that sets its variables, has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_writer() -> bool:
    """Whether this process writes what is measured: rank 0 of a launcher, or a process without one."""
    return not launched() or os.environ["RANK"] == "0"


class Run(Protocol[Found]):
    """What the ranks of a world run: `measure.run`, or another function that yields its results on rank 0."""

    def __call__(
        self, plan: measure.Plan, store: c10d.Store, rank: int, ranks: int, *, local_rank: int
    ) -> Iterator[Found]:
        """Measures this rank's part; every rank exhausts the iterator."""


def run_here(plan: measure.Plan, run: Run[Found]) -> tuple[int, int, Iterator[Found]]:
    """Joins the world of the launcher.

    Returns:
        This rank, the size of the world, and the iterator of `run`, which every rank must exhaust.
    """
    torch.set_num_threads(1)
    store, rank, ranks = next(iter(rendezvous("env://", timeout=_JOIN_TIMEOUT)))
    local = int(os.environ.get("LOCAL_RANK", rank))
    return rank, ranks, run(plan, c10d.PrefixStore("bench", store), rank, ranks, local_rank=local)


def run_world(plan: measure.Plan, ranks: int, run: Run[Found]) -> Iterator[Found]:
    """Starts the ranks, yields the results of rank 0 as they come, and returns when all ranks have ended.

    Raises:
        torch.multiprocessing.spawn.ProcessException: a rank failed; the other ranks were terminated.
    """
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Ranks share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ours, theirs = get_context("spawn").Pipe(duplex=False)
    world: ProcessContext = start_processes(  # type: ignore[no-untyped-call]
        _rank, (run, plan, ranks, store.port, theirs), nprocs=ranks, join=False, start_method="spawn"
    )
    theirs.close()
    try:
        yield from _received(ours, lambda: world.join(timeout=0))
        while not world.join():
            pass
    finally:
        for process in world.processes:
            if process.is_alive():
                process.terminate()
            process.join()


def _received(connection: Connection, check: Callable[[], Any]) -> Iterator[Any]:
    while True:
        check()
        if not connection.poll(_CHECK_INTERVAL):
            continue
        try:
            yield connection.recv()
        except EOFError:
            return


def _rank(rank: int, run: Run[Any], plan: measure.Plan, ranks: int, port: int, found: Connection) -> None:
    torch.set_num_threads(1)
    store = c10d.TCPStore("127.0.0.1", port, is_master=False, timeout=_JOIN_TIMEOUT)
    for item in run(plan, store, rank, ranks, local_rank=rank):
        found.send(item)
    found.close()
