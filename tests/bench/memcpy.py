"""Lays the engine's all_reduce of a long message beside memcpy, in alternating rounds of one run.

    cargo build --release --example bench
    python tests/bench/memcpy.py

An all_reduce of N bytes a rank must read every input and write every result once: N bytes read and N written a rank, as
when every rank copies N bytes. So that is measured, on all ranks at once. The ratio is the time of the all_reduce by
that of the copies: 1 is the least there can be.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from mpi import HERE, Measured, engine, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=HERE.parents[1] / "target/release/examples/bench")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=3, help="in a round, of each")
    parser.add_argument("--pin", action="store_true", help="give each rank a core of its own")
    arguments = parser.parse_args()
    ranks = engine(arguments.program.resolve(), arguments.ranks)
    try:
        if arguments.pin:
            ranks.pin()
        measured = {name: Measured(arguments.calls) for name in ("Memcpy", "Allreduce")}
        for turn in range(-1, arguments.rounds):
            for name in measured if turn % 2 == 0 else reversed(measured):
                times = ranks.turn(name, arguments.bytes, arguments.calls)
                if turn >= 0:  # what comes before is to warm up
                    measured[name].rounds.append(times)
    finally:
        ranks.close()
    for name, rounds in measured.items():
        time = statistics.median(rounds.times())
        print(f"{name:>10} {time / 1e3:8.2f} ms {arguments.bytes / time / 1e3:8.2f} GB/s a rank")
    middle, low, high = ratios(measured["Allreduce"], measured["Memcpy"])
    print(f"all_reduce by memcpy, {arguments.ranks} ranks: {middle:.2f} [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
