"""Lays long messages that several threads of a rank copy beside those of one, in alternating rounds of one run.

    cargo build --release --example bench
    python tests/bench/threads.py

The ratio is the time with one thread by that with more (``NCCLX_RS_THREADS``): above 1, more are faster.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi import HERE, engine, measure, ratios

OPERATIONS = ["Reduce", "Bcast", "Uniband", "Gather", "Scatter", "Allreduce", "Allgather"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=HERE.parents[1] / "target/release/examples/bench")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", default="1", help="beside the one of each rank, or auto")
    parser.add_argument("--bytes", type=int, nargs="+", default=[64 << 20])
    parser.add_argument("--ops", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--milliseconds", type=float, default=50.0, help="of a turn")
    arguments = parser.parse_args()
    contenders = [
        engine(arguments.program.resolve(), arguments.ranks, threads, {"NCCLX_RS_THREADS": threads})
        for threads in ("0", arguments.threads)
    ]
    try:
        for operation in arguments.ops:
            for size in arguments.bytes:
                results = measure(contenders, operation, size, arguments.rounds, arguments.milliseconds)
                alone, shared = results["0"], results[arguments.threads]
                times = [measured.least_most_mean()[1] / 1e3 for measured in (alone, shared)]
                middle, low, high = ratios(alone, shared)
                print(
                    f"{operation:>10} {size:>10} bytes: {times[0]:8.2f} ms alone, {times[1]:8.2f} ms with "
                    f"{arguments.threads} more, ratio {middle:.2f} [{low:.2f}, {high:.2f}]",
                    flush=True,
                )
    finally:
        for contender in contenders:
            contender.close()


if __name__ == "__main__":
    main()
