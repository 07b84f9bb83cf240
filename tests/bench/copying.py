"""How long messages of two ranks of a host come: what `single_copy=auto` chooses beside the two ways, each alone.

    cargo build --release --example bench
    python tests/bench/copying.py                # or: --ops Bcast --min 1048576 --max 1048576

A row tells how many times as long each way takes as `auto`: the median of the rounds, with the 10th and 90th
percentile.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi import HERE, OPERATIONS, engine, measure, ratios

WAYS = {"auto": "auto", "ring": "off", "single copy": "on"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=HERE.parents[1] / "target/release/examples/bench")
    parser.add_argument("--ops", default="PingPong,Bcast,Scatter,Gather,Reduce,Allreduce,Allgather")
    parser.add_argument("--min", type=int, default=128 << 10)
    parser.add_argument("--max", type=int, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    operations = arguments.ops.split(",")
    if unknown := [operation for operation in operations if operation not in OPERATIONS]:
        parser.error(f"--ops: expected some of {','.join(OPERATIONS)}, got {','.join(unknown)}")
    if not 0 < arguments.min <= arguments.max or arguments.rounds < 2:
        parser.error("--min, --max and --rounds: expected lengths from the shorter one on, and at least 2 rounds")
    program = arguments.program.resolve()
    ways = [engine(program, 2, name, {"NCCLX_RS_SINGLE_COPY": value}) for name, value in WAYS.items()]
    try:
        for way in ways:
            way.pin()
        print(f"{'operation':>12}{'bytes':>12}{'auto [us]':>12}   " + "".join(f"{way.name:>24}" for way in ways[1:]))
        for operation in operations:
            size = arguments.min
            while size <= arguments.max:
                results = measure(ways, operation, size, arguments.rounds, 5.0)
                line = f"{operation:>12}{size:>12}{results['auto'].least_most_mean()[1]:>12.1f}   "
                for way in ways[1:]:
                    middle, low, high = ratios(results[way.name], results["auto"])
                    line += f"{f'{middle:.2f} [{low:.2f}, {high:.2f}]':>24}"
                print(line, flush=True)
                size *= 2
    finally:
        for way in ways:
            way.close()


if __name__ == "__main__":
    main()
