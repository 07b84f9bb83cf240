"""What a call of c10d costs where no data has to move: one rank, four bytes, in alternating rounds of one run.

    python tests/bench/overhead.py --vs gloo

PyTorch's `fake` backend, which does nothing, tells what the call costs by itself; the rest is the backend's overhead.
The ratio is the first backend's overhead by the second's: below 1, the first costs less.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from spread import spread
from torch._C import _distributed_c10d as c10d

NOTHING = "fake"


def once(call: Callable[[Any], Any], group: Any, calls: int) -> float:
    """Microseconds of the typical call."""
    clock, stamps = time.perf_counter_ns, []
    for _ in range(calls):
        began = clock()
        call(group)
        stamps.append(clock() - began)
    return statistics.median(stamps) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ncclx_rs")
    parser.add_argument("--vs", default="gloo")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=1000, help="of each backend in a round")
    arguments = parser.parse_args()
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers `fake`
    dist.init_process_group(arguments.backend, store=c10d.HashStore(), rank=0, world_size=1)
    names = (arguments.backend, arguments.vs, NOTHING)
    groups: dict[str, Any] = {name: dist.new_group(backend=name) for name in names}
    data = torch.ones(1)
    operations: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda group: dist.all_reduce(data, group=group),
        "broadcast": lambda group: dist.broadcast(data, 0, group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }
    print(f"{'microseconds':>12}" + "".join(name.rjust(10) for name in names) + "   ratio of overheads [p10, p90]")
    for operation, call in operations.items():
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(arguments.rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                times[name].append(once(call, groups[name], arguments.calls))
        ours, theirs, floor = (times[name] for name in names)
        ratios = [(a - c) / (b - c) for a, b, c in zip(ours, theirs, floor, strict=True)]
        shown = "".join(f"{statistics.median(times[name]):10.2f}" for name in names)
        print(f"{operation:>12}{shown}   {spread(ratios)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
