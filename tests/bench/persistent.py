"""Lays the persistent all_gather beside all_gather for the same shape, in alternating rounds of one run.

    python tests/bench/persistent.py

Both have the same output, in memory of the communicator's allocator, which the other ranks can map. The ratio is the
time of the all_gather by that of the persistent one: above 1, the persistent one is faster.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable

import ncclx_rs
import torch
from spread import spread

# Rounds before the first that counts.
WARM = 2


def timed(comm: ncclx_rs.TorchComm, call: Callable[[], object], calls: int) -> float:
    """How long a call takes, in seconds, on the slowest rank."""
    comm.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    own = torch.tensor([(time.perf_counter() - begin) / calls], dtype=torch.float64)
    comm.all_reduce(own, ncclx_rs.ReduceOp.MAX)
    return own.item()


def measure(rank: int, arguments: argparse.Namespace) -> None:
    """Measures on one rank, of which the first prints."""
    if arguments.pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    size = arguments.ranks
    with ncclx_rs.new_comm("ncclx", "cpu", "persistent", rank=rank, size=size) as comm:
        for block in arguments.bytes:
            own = torch.full((block // 4,), float(rank))
            output = comm.get_mem_allocator().empty(size * block // 4)
            handle = comm.all_gather_p_init(output)
            operations = {
                "all_gather": lambda own=own, output=output: comm.all_gather_single(output, own),
                "persistent": lambda own=own, handle=handle: comm.all_gather_p_exec(handle, own),
            }
            calls = max(1, min(200, (64 << 20) // (size * block)))
            rounds: dict[str, list[float]] = {name: [] for name in operations}
            for turn in range(WARM + arguments.rounds):
                for name in operations if turn % 2 == 0 else reversed(operations):
                    rounds[name].append(timed(comm, operations[name], calls))
            assert output.view(size, -1).eq(torch.arange(size).view(size, 1)).all(), "the result is wrong"
            comm.all_gather_p_free(handle)
            if rank == 0:
                plain, persistent = (times[WARM:] for times in rounds.values())
                ratios = [one / other for one, other in zip(plain, persistent, strict=True)]
                print(
                    f"{block:>10} bytes a rank, {size} ranks: all_gather {spread(plain, 1e6)} us, "
                    f"persistent {spread(persistent, 1e6)} us, ratio {spread(ratios)}",
                    flush=True,
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, nargs="+", default=[1 << shift for shift in range(18, 25)], help="a rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pin", action="store_true", help="give each rank a core of its own")
    arguments = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29611")
    start = multiprocessing.get_context("spawn").Process
    ranks = [start(target=measure, args=(rank, arguments)) for rank in range(arguments.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
