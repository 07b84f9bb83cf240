"""Counts the instructions of hot paths and compares them with the bounds in instructions.json.

    make instructions             # fails where a call takes more than is allowed
    make instructions UPDATE=1    # takes what it finds as the new bounds
    make instructions-by-default  # the same for paths that are counted in a release build with cargo's own settings

Instructions, unlike times, are nearly the same on every machine and, where nobody waits, under any load. They are those
that valgrind's tool callgrind sees: of this process, none of the kernel's. A path is run with few and with many calls,
and the difference is that of the calls. The bounds are those of x86-64 with AVX2, which is as far as valgrind goes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
BOUNDS = HERE / "instructions.json"
# What a call may take beyond its bound: another compiler, and which thread the system lets run first.
AIR = 1.08
# Far below its bound, a path would have room to become slower unnoticed.
SLACK = 0.85
# Paths in which ranks wait for each other. Valgrind runs one thread at a time. Where it is fair to all, these take
# turns: on an idle machine, counts of one build lie 3 % apart, and are the highest. Other work has ranks look for news
# in vain less often, by which counts are up to a quarter lower.
FAIR = "--fair-sched=yes"
WAITING = {
    "all_reduce_8_bytes",
    "all_reduce_64_kib",
    "ping_pong_shm",
    "ping_pong_tcp",
    "reductions",
    "reductions_by_default",
}
AIR_WAITING = 1.15
COUNTS_WAITING = 3
# Ends the names of paths that are counted in a build as cargo makes them by default, as of most programs in Rust.
BY_DEFAULT = "_by_default"
CARGOS_DEFAULTS = {"LTO": "false", "CODEGEN_UNITS": "16"}
# Calls of each path: few, so that all memory is there and all plans are made, and many.
CALLS = {
    "all_reduce_alone": (100, 600),
    "all_reduce_8_bytes": (100, 600),
    "all_reduce_64_kib": (50, 150),
    "messages_at_once": (100, 600),
    "ping_pong_shm": (100, 600),
    "ping_pong_tcp": (100, 600),
    "plan": (5, 25),
    "reductions": (5, 25),
    "reductions_by_default": (5, 25),
}


def count(program: Path, path: str, calls: int) -> int:
    """The instructions of a process that takes a path so many times."""
    run = subprocess.run(
        ["valgrind", FAIR, "--tool=callgrind", "--callgrind-out-file=/dev/null", str(program), path, str(calls)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = re.search(r"Collected : (\d+)", run.stderr)
    if run.returncode != 0 or found is None:
        raise SystemExit(f"{path}: valgrind ended with exit code {run.returncode}:\n{run.stdout}{run.stderr}")
    return int(found[1])


def measure(program: Path, path: str) -> int:
    """The instructions of one call on all ranks together."""
    few, many = CALLS[path]
    call = path.removesuffix(BY_DEFAULT)
    times = COUNTS_WAITING if path in WAITING else 1
    found = [(count(program, call, many) - count(program, call, few)) / (many - few) for _ in range(times)]
    return round(min(found))


def verdicts(found: dict[str, int], bounds: dict[str, int]) -> list[str]:
    """What is wrong with counts under these bounds."""
    wrong = []
    for path in found.keys() | bounds.keys():
        if path not in found or path not in bounds:
            wrong.append(f"{path}: expected a path and its bound, got one without the other")
        elif found[path] > bounds[path] * (AIR_WAITING if path in WAITING else AIR):
            more = found[path] / bounds[path] - 1
            wrong.append(f"{path}: expected at most {bounds[path]} instructions a call, got {found[path]}, {more:+.0%}")
        elif path not in WAITING and found[path] < bounds[path] * SLACK:
            wrong.append(f"{path}: {found[path]} instructions a call, far below the bound of {bounds[path]}; lower it")
    return sorted(wrong)


def build(target: Path, **settings: str) -> Path:
    """The program, built for release with these settings of the profile."""
    command = ["cargo", "build", "--locked", "--release", "--package", "ncclx_rs_instructions"]
    profile = {f"CARGO_PROFILE_RELEASE_{name}": value for name, value in settings.items()}
    subprocess.run(command, check=True, cwd=HERE, env=os.environ | profile | {"CARGO_TARGET_DIR": str(target)})
    return target / "release/ncclx_rs_instructions"


def of_build(paths: Iterable[str], by_default: bool) -> list[str]:
    """Those of the paths that are counted in this build."""
    return [path for path in paths if path.endswith(BY_DEFAULT) == by_default]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write what is found to instructions.json")
    parser.add_argument("--by-default", action="store_true", help="count in a build with cargo's own settings")
    options = parser.parse_args(arguments)
    if platform.machine() != "x86_64" or shutil.which("valgrind") is None:
        print("expected an x86-64 machine with valgrind, whose counts the bounds are", file=sys.stderr)
        return 2
    target = Path(os.environ.get("CARGO_TARGET_DIR", HERE.parents[1] / "target"))
    program = build(target / "by_default", **CARGOS_DEFAULTS) if options.by_default else build(target)
    # One after the other, since they are that other work for each other.
    found = {path: measure(program, path) for path in of_build(CALLS, options.by_default)}
    bounds = json.loads(BOUNDS.read_text())
    if options.update:
        bounds |= found
        BOUNDS.write_text(json.dumps(bounds, indent=1) + "\n")
    bounds = {path: bounds[path] for path in of_build(bounds, options.by_default)}
    for path, instructions in found.items():
        print(f"{path:<24}{instructions:>10} instructions a call; bound {bounds.get(path)}")
    wrong = verdicts(found, bounds)
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        command = "make instructions-by-default" if options.by_default else "make instructions"
        print(f"If that is meant: {command} UPDATE=1", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
