"""Finds the fastest algorithm for each collective, world and size, and writes a tuning file for the engine.

    ncclx-rs tune tuning.json --ranks 2,4,8
    NCCLX_RS_TUNING_FILE=tuning.json python train.py

See docs/algorithms.md for the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.multiprocessing.spawn import ProcessException

from ncclx_rs._load import native
from ncclx_rs.bench import launch, report
from ncclx_rs.bench.__main__ import FAILED, above, check_output, names_of, parse_size, rank_list, sizes_between
from ncclx_rs.bench.measure import Plan, Result, Row, compare, measure_row, world
from ncclx_rs.bench.operations import OPERATIONS, Place
from ncclx_rs.bench.progress import Progress

# The operation that is measured for each collective of the file. Other collectives have only one algorithm.
COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
# The version of the file's format; see src/algo/tuning.rs.
VERSION = 1
# An algorithm takes over from that of the smaller size only if it is faster by this factor: less may be chance, and
# makes long files.
MARGIN = 1.05


@dataclass(frozen=True)
class Finding:
    """The algorithms of one collective at one size; `hosts` is the number of hosts that the ranks are on."""

    collective: str
    hosts: int
    row: Row


def run(plan: Plan, store: c10d.Store, rank: int, ranks: int, *, local_rank: int) -> Iterator[Finding]:
    """Measures every algorithm for the collectives of a plan in this world. Every rank must exhaust the iterator.

    Yields:
        On rank 0, a finding for each size of each collective with several algorithms. On other ranks nothing.
    """
    timeout = timedelta(seconds=plan.timeout)
    algorithms: dict[str, list[str]] = {}
    hosts = 0

    def groups() -> dict[str, Any]:
        nonlocal hosts
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        hosts = len({backend._host(other) for other in range(ranks)})
        for collective in plan.operations:
            algorithms[collective] = native().algorithms(collective, ranks, hosts)
        names = dict.fromkeys(name for each in algorithms.values() for name in each)
        options = {name: native().Options(timeout, {"algorithm": name}) for name in names}
        return {name: dist.new_group(backend="ncclx_rs", pg_options=options[name]) for name in names}

    with world(plan, store, Place(rank, ranks), local_rank, groups) as (made, control):
        for collective, names in algorithms.items():
            if len(names) < 2:
                continue
            operation = COLLECTIVES[collective]
            chosen = {name: made[name] for name in names}
            for case in dataclasses.replace(plan, operations=(operation,)).rows(ranks):
                row = measure_row(plan, case, OPERATIONS[operation], chosen, control)
                if row is not None:
                    yield Finding(collective, hosts, row)


def table(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The rows of the file. The findings of one collective and world must be adjacent, by ascending size.

    Beyond the largest size, its row holds if that is long; otherwise the engine's own choice does.
    """
    rows: list[dict[str, Any]] = []
    for (collective, ranks, hosts), same in itertools.groupby(findings, _place):
        fastest: list[tuple[str, int]] = []
        for finding in same:
            results = finding.row.results
            best = min(results, key=lambda name: results[name].time)
            if fastest:
                kept = fastest[-1][0]
                best = best if _takes_over(results[best], results[kept]) else kept
            fastest.append((best, finding.row.case.bytes))
        for algorithm, sizes in itertools.groupby(fastest, lambda entry: entry[0]):
            _, most = list(sizes)[-1]
            place = {"collective": collective, "ranks": ranks, "hosts": hosts}
            rows.append({**place, "max_bytes": most, "algorithm": algorithm})
        if fastest[-1][1] >= _LONG:
            del rows[-1]["max_bytes"]
    return rows


def _takes_over(fastest: Result, kept: Result) -> bool:
    """Whether the fastest algorithm is so much faster than that of the smaller size."""
    # A simulated time may be zero, which has no ratio to any other.
    if fastest.time == 0 or kept.time == 0:
        return fastest.time < kept.time
    ratio = compare(fastest, kept)
    return ratio is not None and ratio.median >= MARGIN


# What is fastest for so many bytes is so for more.
_LONG = 4 << 20


def _place(finding: Finding) -> tuple[str, int, int]:
    return finding.collective, finding.row.case.ranks, finding.hosts


_row_place = operator.itemgetter("collective", "ranks", "hosts")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a tuning file; none if there is no file.

    Raises:
        ValueError: the file is no tuning file of this version.
    """
    if not path.exists():
        return []
    try:
        known = json.loads(path.read_text())
        if known["version"] != VERSION:
            raise ValueError(f"version {known['version']}")
        rows = [row for row in known["rows"] if _row_place({"hosts": 1, **row})]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected a tuning file of version {VERSION}, got another: {error}") from None
    return rows


def write(path: Path, rows: Sequence[dict[str, Any]], note: str) -> None:
    """Writes a tuning file, one row a line. The file's rows of other collectives and worlds stay.

    Raises:
        ValueError: the file exists and is no tuning file of this version.
    """
    new = {_row_place(row) for row in rows}
    kept = [row for row in read(path) if _row_place({"hosts": 1, **row}) not in new]
    lines = ",\n".join(f"  {json.dumps(row)}" for row in [*kept, *rows])
    path.write_text(f'{{\n "version": {VERSION},\n "note": {json.dumps(note)},\n "rows": [\n{lines}\n ]\n}}\n')


def check_file(made: argparse.ArgumentParser, option: str, path: Path) -> None:
    """Ends the program, before hours of measuring, if `write` cannot write a file."""
    check_output(made, option, path)
    try:
        read(path)
    except (OSError, ValueError) as error:
        made.error(f"{option}: {error}")


def written(path: Path) -> str:
    """What the command line says of a file that it has written."""
    return f"\nwrote {path}; NCCLX_RS_TUNING_FILE={path} makes programs use it"


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(
        prog="ncclx-rs tune",
        description="Finds the fastest algorithm for each collective, world and size, and writes a file that the "
        "setting tuning_file names. Under torchrun, or a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT as it does, it measures the launcher's world, else worlds on this host.",
    )
    made.add_argument("file", type=Path, help="what to write; rows of other worlds that it has already stay")
    made.add_argument(
        "--collectives", type=names_of(list(COLLECTIVES)), default="all", help=f"{', '.join(COLLECTIVES)} (all)"
    )
    made.add_argument("--ranks", type=rank_list, help="the sizes of the worlds to start, as in 2,4,8 (2)")
    made.add_argument("--min", type=parse_size, default="8", help="the smallest size in bytes; K, M, G (8)")
    made.add_argument("--max", type=parse_size, default="16M", help="the largest size (16M)")
    made.add_argument("--factor", type=above(int, 2), default=4, help="from one size to the next (4)")
    made.add_argument("--rounds", type=above(int, 1), default=15, help="rounds of a size (15)")
    made.add_argument(
        "--round-ms", type=above(float, 0.001), default=10.0, help="milliseconds of an algorithm's turn (10)"
    )
    made.add_argument("--pin", action="store_true", help="keep each rank's calling thread on a core of its own")
    made.add_argument("--json", action="store_true", help="print all times and the file's new rows as JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the file.

    Args:
        arguments: The command line without the program; that of the process if not given.

    Returns:
        The exit code: 1 if an algorithm or a rank failed.
    """
    made = parser()
    return execute(made.parse_args(arguments), made)


def execute(options: argparse.Namespace, made: argparse.ArgumentParser) -> int:
    """Measures with these options, and writes the file; returns the exit code."""
    if options.min > options.max:
        made.error(f"--min: expected at most --max, which is {options.max}, got {options.min}")
    if launch.launched() and options.ranks is not None:
        made.error("--ranks: the launcher has decided it; leave it away under torchrun")
    if not options.file.parent.is_dir():
        made.error(f"file: expected a path in a folder that exists, got {options.file}")
    if launch.is_writer():
        check_file(made, "file", options.file)
    plan = Plan(
        operations=options.collectives,
        sizes=sizes_between(options.min, options.max, options.factor),
        rounds=options.rounds,
        round_seconds=options.round_ms / 1e3,
        pin=options.pin,
    )
    if launch.launched():
        rank, _, found = launch.run_here(plan, run)
        if rank != 0:
            return sum(1 for _ in found)  # none: rank 0 has all
    else:
        worlds = options.ranks or (2,)
        found = (finding for ranks in worlds for finding in launch.run_world(plan, ranks, run))
    findings: list[Finding] = []
    try:
        with Progress(None, unit="row") as progress:
            for finding in found:
                if not options.json:
                    with progress.aside():
                        _show(finding, findings[-1] if findings else None)
                findings.append(finding)
                progress.step()
    except ProcessException as error:
        print(error, file=sys.stderr)
        return FAILED
    broken = [
        f"{finding.collective} of {finding.row.case.bytes} bytes by {name}: {result.error or 'wrong results'}"
        for finding in findings
        for name, result in finding.row.results.items()
        if result.error or result.wrong
    ]
    if broken or not findings:
        print("\n".join(broken) or "nothing to choose: these worlds have one algorithm a collective", file=sys.stderr)
        return FAILED
    rows = table(findings)
    try:
        write(options.file, rows, report.machine_today())
    except ValueError as error:
        print(error, file=sys.stderr)
        return FAILED
    if options.json:
        print(json.dumps(_as_json(options.file, findings, rows), indent=2))
    else:
        print(written(options.file))
    return 0


def _as_json(file: Path, findings: Sequence[Finding], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    times = [
        {
            "collective": finding.collective,
            "ranks": finding.row.case.ranks,
            "hosts": finding.hosts,
            "bytes": finding.row.case.bytes,
            "microseconds": {name: result.time for name, result in finding.row.results.items()},
        }
        for finding in findings
    ]
    return {"file": str(file), "rows": list(rows), "times": times}


def _show(finding: Finding, before: Finding | None) -> None:
    case, results = finding.row.case, finding.row.results
    if before is None or _place(before) != _place(finding):
        hosts = f", {finding.hosts} hosts" if finding.hosts > 1 else ""
        print(f"\n# {finding.collective}, {case.ranks} ranks{hosts}: microseconds a call")
        print("     bytes" + "".join(name.rjust(20) for name in results))
    times = "".join(f"{result.time:>20.2f}" for result in results.values())
    print(f"{report.size_text(case.bytes):>10}{times}", flush=True)
