"""Simulates collectives, and the start, of worlds of any size under the LogGP model.

    ncclx-rs simulate --measure host.json
    ncclx-rs simulate --parameters cluster.json --ranks-per-host 8 --hosts 16,128 --sizes 1K,1M
    ncclx-rs simulate --parameters cluster.json --ranks-per-host 8 --hosts 16,128 --start

See docs/scale.md for the model and the file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclx_rs._load import native
from ncclx_rs.bench import report, tune
from ncclx_rs.bench.__main__ import FAILED, check_output, names_of, parse_size, rank_list
from ncclx_rs.bench.measure import Case, Result, Row
from ncclx_rs.bench.progress import Progress

# What can be simulated.
COLLECTIVES = (*tune.COLLECTIVES, "all_to_all", "barrier")
# The version of the JSON, raised when a reader would have to change.
SCHEMA = 1
# The version of the file of parameters; see src/simulate/model.rs.
VERSION = 1
_LINK = ("latency", "overhead", "gap", "gap_per_byte")
_START = ("admit", "relay", "table_per_rank")
# The limits of src/simulate/.
_MOST_SECONDS = 3600.0
_MOST_BYTES = 64 << 30
_MOST_RANKS = 1 << 20
_COLUMNS = {
    "rank_messages_max": "messages",
    "rank_messages_mean": "mean",
    "rank_bytes_max": "bytes",
    "rank_bytes_mean": "mean",
    "host_messages_max": "messages",
    "host_messages_mean": "mean",
    "host_bytes_max": "bytes",
    "host_bytes_mean": "mean",
}
_WIDTHS = (10, 10, 15, 15, 10, 10, 15, 15)


@dataclass(frozen=True)
class World:
    """So many ranks on each of so many hosts."""

    ranks_per_host: int
    hosts: int

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.ranks_per_host * self.hosts


@dataclass(frozen=True)
class Finding:
    """One collective of one size in one world, by each algorithm that was simulated.

    Attributes:
        collective: Its name.
        world: The world.
        bytes: The size after rounding to whole blocks.
        reports: For each algorithm what `_native.simulate` returns.
        refused: For each algorithm that was not simulated, why.
        chosen: The algorithm that the engine takes by itself.
    """

    collective: str
    world: World
    bytes: int
    reports: dict[str, dict[str, float]]
    refused: dict[str, str]
    chosen: str

    @property
    def fastest(self) -> str | None:
        """The fastest of the algorithms that were simulated."""
        return min(self.reports, key=lambda name: self.reports[name]["seconds"], default=None)


def seconds(text: str) -> float:
    """Seconds.

    Raises:
        argparse.ArgumentTypeError: the text is no number from 0 to an hour.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"expected seconds from 0 to {_MOST_SECONDS}, got {text!r}")
    return value


def seconds_of_link(text: str) -> dict[str, float]:
    """The parameters of a link from a text such as ``1e-6,2e-7,3e-7,1e-10``: L, o, g and G in seconds.

    Raises:
        argparse.ArgumentTypeError: it is no such text.
    """
    parts = text.split(",")
    if len(parts) != len(_LINK):
        raise argparse.ArgumentTypeError(f"expected seconds L,o,g,G such as 1e-6,2e-7,3e-7,1e-10, got {text!r}")
    return dict(zip(_LINK, map(seconds, parts), strict=True))


def sizes(text: str) -> tuple[int, ...]:
    """Sizes in bytes from a list with commas.

    Raises:
        argparse.ArgumentTypeError: one of them is no size, or too large.
    """
    found = tuple(dict.fromkeys(parse_size(part) for part in text.split(",")))
    if max(found) > _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"expected at most {report.size_text(_MOST_BYTES)}, got {text!r}")
    return found


def numbers(text: str) -> tuple[int, ...]:
    """Numbers of ranks or hosts from a list with commas.

    Raises:
        argparse.ArgumentTypeError: one of them is no such number, or more than any world has.
    """
    found = rank_list(text)
    if max(found) > _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"expected at most {_MOST_RANKS}, got {text!r}")
    return found


def late_rank(text: str) -> tuple[int, float]:
    """A rank and its seconds from a text such as ``3=0.01``.

    Raises:
        argparse.ArgumentTypeError: it is no such text.
    """
    rank, _, late = text.partition("=")
    if not rank.isdecimal() or int(rank) >= _MOST_RANKS or not late:
        raise argparse.ArgumentTypeError(f"expected RANK=SECONDS such as 3=0.01, got {text!r}")
    return int(rank), seconds(late)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(
        prog="ncclx-rs simulate",
        description="Runs the engine's schedules in worlds of any size under the LogGP model, and says how long they "
        "take, what they send and which algorithm is the fastest. Nothing is sent.",
    )
    what = made.add_argument_group("what to simulate; lists are separated by commas, or the word all")
    what.add_argument(
        "--collectives", type=names_of(COLLECTIVES), default="all", help=f"{', '.join(COLLECTIVES)} (all)"
    )
    what.add_argument(
        "--start", action="store_true", help="how the ranks meet when a communicator begins, instead of collectives"
    )
    what.add_argument("--algorithms", help="the algorithms' names (all that do the collective)")
    what.add_argument("--sizes", type=sizes, default="1K,64K,1M,16M", help="in bytes; K, M, G (1K,64K,1M,16M)")
    what.add_argument("--ranks-per-host", type=numbers, default="8", help="the ranks of each host (8)")
    what.add_argument("--hosts", type=numbers, default="8", help="the numbers of hosts (8)")
    what.add_argument(
        "--late",
        type=late_rank,
        action="append",
        default=[],
        metavar="RANK=SECONDS",
        help="this rank begins so much later than the others; can be given for several ranks",
    )
    model = made.add_argument_group("parameters, in seconds; options win over the file")
    model.add_argument("--parameters", type=Path, metavar="FILE", help="a file of parameters, as docs/scale.md has it")
    model.add_argument("--within-host", type=seconds_of_link, metavar="L,o,g,G", help="between ranks of one host")
    model.add_argument("--between-hosts", type=seconds_of_link, metavar="L,o,g,G", help="between hosts")
    model.add_argument(
        "--reduce-per-byte", type=seconds, metavar="S", help="to combine a byte (that of the file, or 0)"
    )
    model.add_argument("--copy-per-byte", type=seconds, metavar="S", help="to copy a byte (that of the file, or 0)")
    out = made.add_argument_group("what comes out")
    out.add_argument(
        "--measure",
        type=Path,
        metavar="FILE",
        help="measure the parameters between two ranks of this host instead, and write them to a file",
    )
    out.add_argument("--output", type=Path, metavar="FILE", help="write the fastest algorithms as ncclx-rs tune does")
    out.add_argument("--json", action="store_true", help="print all numbers as JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulates, or measures.

    Args:
        arguments: The command line without the program; that of the process if not given.

    Returns:
        The exit code: 1 if nothing could be simulated.
    """
    made = parser()
    return execute(made.parse_args(arguments), made)


def execute(options: argparse.Namespace, made: argparse.ArgumentParser) -> int:
    """Simulates with these options, or measures; returns the exit code."""
    outputs = (("--measure", options.measure, check_output), ("--output", options.output, tune.check_file))
    for option, file, check in outputs:
        if file is None:
            continue
        if not file.parent.is_dir():
            made.error(f"{option}: expected a path in a folder that exists, got {file}")
        check(made, option, file)
    if options.measure is not None:
        return _measure(options.measure, options.json)
    if options.start and options.output is not None:
        made.error("--output: a start has no algorithms to choose from")
    worlds = [World(ranks, hosts) for hosts in options.hosts for ranks in options.ranks_per_host]
    try:
        parameters = _parameters(options)
        if options.start:
            return _start(parameters, worlds, options.late, options.json)
        wanted = _wanted(options, worlds)
        findings: list[Finding] = []
        found = simulated(parameters, options.collectives, wanted, options.sizes, worlds, options.late)
        with Progress(None, unit="row") as progress:
            for finding in found:
                if not options.json:
                    with progress.aside():
                        _show(finding, findings[-1] if findings else None, bool(options.late))
                findings.append(finding)
                progress.step()
    except ValueError as error:
        made.error(str(error))
    if not any(finding.reports for finding in findings):
        reasons = {reason for finding in findings for reason in finding.refused.values()}
        print("\n".join(reasons) or "nothing to simulate: no such algorithm does these collectives", file=sys.stderr)
        return FAILED
    rows: list[dict[str, Any]] = []
    if options.output is not None:
        try:
            rows = _write(options.output, findings)
        except ValueError as error:
            print(error, file=sys.stderr)
            return FAILED
    if options.json:
        print(json.dumps(_as_json(parameters, options, findings, rows), indent=2))
    elif options.output is not None:
        print(tune.written(options.output))
    return 0


def simulated(
    parameters: str,
    collectives: Sequence[str],
    algorithms: dict[World, dict[str, list[str]]],
    sizes: Sequence[int],
    worlds: Sequence[World],
    late: Sequence[tuple[int, float]] = (),
) -> Iterator[Finding]:
    """Simulates each collective by each algorithm, for every size in every world.

    Raises:
        ValueError: an argument or a parameter is wrong.
    """
    for world in worlds:
        for collective in collectives:
            seen: set[int] = set()
            names = algorithms[world][collective]
            for size in sizes if collective != "barrier" else (0,):
                finding = _finding(parameters, collective, names, size, world, late)
                # Sizes that come to the same blocks are one.
                if names and finding.bytes not in seen:
                    seen.add(finding.bytes)
                    yield finding


def _start(parameters: str, worlds: Sequence[World], late: Sequence[tuple[int, float]], as_json: bool) -> int:
    """Simulates how the ranks of each world meet; returns the exit code.

    Raises:
        ValueError: a parameter or a world is wrong.
    """
    starts: list[dict[str, float]] = []
    for world in worlds:
        try:
            found = native().simulate_start(
                parameters, ranks_per_host=world.ranks_per_host, hosts=world.hosts, late=list(late)
            )
        except RuntimeError as error:
            print(f"{world.ranks} ranks on {world.hosts} hosts: not simulated: {error}", file=sys.stderr)
            continue
        if not as_json:
            if not starts:
                print("# simulated: from rank 0's word to the store until the last rank knows all; the table in bytes")
                print("# time in milliseconds; what a rank sends, and a host to others: the most, and the mean")
                print(f"{'ranks':>10} {'hosts':>10} {'table':>10} {'time':>12}{_late_column(bool(late))} {_names()}")
            line = f"{world.ranks:>10} {world.hosts:>10} {found['bytes']:>10} {found['seconds'] * 1e3:>12.3f}"
            line += f" {found['late_costs'] * 1e3:>12.3f}" if late else ""
            print(f"{line} {_cells(found)}", flush=True)
        starts.append({"ranks": world.ranks, "hosts": world.hosts, **found})
    if as_json and starts:
        told = {str(rank): seconds for rank, seconds in late}
        print(
            json.dumps(
                {"schema": SCHEMA, "parameters": json.loads(parameters), "late": told, "starts": starts}, indent=2
            )
        )
    return 0 if starts else FAILED


def _finding(
    parameters: str,
    collective: str,
    names: Sequence[str],
    size: int,
    world: World,
    late: Sequence[tuple[int, float]],
) -> Finding:
    reports, refused = {}, {}
    for name in names:
        try:
            reports[name] = native().simulate(
                parameters,
                collective,
                name,
                size,
                ranks_per_host=world.ranks_per_host,
                hosts=world.hosts,
                late=list(late),
            )
        except RuntimeError as error:
            refused[name] = str(error)
    rounded = next((int(found["bytes"]) for found in reports.values()), size)
    chosen = native().preferred_algorithm(collective, world.ranks, world.hosts, rounded)
    return Finding(collective, world, rounded, reports, refused, chosen)


def _parameters(options: argparse.Namespace) -> str:
    """The parameters of the file and the options as JSON.

    Raises:
        ValueError: they are wrong, or there are none.
    """
    known: dict[str, Any] = {"version": VERSION, "reduce_per_byte": 0.0}
    place = "the parameters of the command line"
    if options.parameters is not None:
        place = str(options.parameters)
        try:
            text = options.parameters.read_text()
            native().check_parameters(text)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--parameters: {place} cannot be read: {error}") from None
        except ValueError as error:
            raise ValueError(f"--parameters: {place}: {error}") from None
        known = json.loads(text)
    elif options.within_host is None:
        raise ValueError(
            "--parameters: expected a file, or --within-host and for several hosts --between-hosts; "
            "ncclx-rs simulate --measure FILE makes a file of this host"
        )
    for field in ("within_host", "between_hosts", "reduce_per_byte", "copy_per_byte"):
        value = getattr(options, field)
        if isinstance(value, dict):  # the file's other fields of a link stay
            known[field] = {**known.get(field, {}), **value}
        elif value is not None:
            known[field] = value
    text = json.dumps(known)
    try:
        native().check_parameters(text)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return text


def _wanted(options: argparse.Namespace, worlds: Sequence[World]) -> dict[World, dict[str, list[str]]]:
    """For each world and collective the algorithms that do it and are asked for.

    Raises:
        ValueError: one that is asked for does none of these collectives in any of these worlds; a world is too large.
    """
    for world in worlds:
        native().check_world(world.ranks_per_host, world.hosts)
    able = {
        world: {name: native().algorithms(name, world.ranks, world.hosts, all=True) for name in options.collectives}
        for world in worlds
    }
    if options.algorithms in (None, "all"):
        return able
    asked = options.algorithms.split(",")
    known = dict.fromkeys(name for each in able.values() for names in each.values() for name in names)
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise ValueError(
            f"argument --algorithms: unknown: {', '.join(unknown)}; expected all, or some of {','.join(known)}"
        )
    return {
        world: {collective: [name for name in names if name in asked] for collective, names in each.items()}
        for world, each in able.items()
    }


def _measure(file: Path, as_json: bool) -> int:
    found = dict(native().measure_parameters())
    content = {
        "version": VERSION,
        "note": f"measured: {report.machine_today()}",
        "within_host": {name: found[name] for name in _LINK},
        "reduce_per_byte": found["reduce_per_byte"],
        "copy_per_byte": found["copy_per_byte"],
        "start": {name: found[name] for name in _START},
    }
    file.write_text(json.dumps(content, indent=1) + "\n")
    if as_json:
        print(json.dumps(content))
        return 0
    print("# between two ranks of this host")
    for name in ("latency", "overhead", "gap", *_START):
        print(f"{name:16} {found[name] * 1e6:10.3f} us")
    for name in ("gap_per_byte", "reduce_per_byte", "copy_per_byte"):
        print(f"{name:16} {found[name] * 1e9:10.4f} ns")
    print(f"\nwrote {file}; ncclx-rs simulate --parameters {file} takes it")
    return 0


def _write(file: Path, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Writes the fastest algorithms as a tuning file. Where one was not simulated, the fastest is not known: no row.

    Raises:
        ValueError: there is nothing to write, or the file is another one.
    """
    unknown: set[tuple[str, World]] = set()
    tuned = []
    for finding in sorted(findings, key=lambda one: one.bytes):
        names = native().algorithms(finding.collective, finding.world.ranks, finding.world.hosts)
        if finding.collective not in tune.COLLECTIVES or len(names) < 2:
            continue
        if not finding.reports.keys() >= set(names):
            unknown.add((finding.collective, finding.world))
            continue
        # No file names one that a program has to name by itself.
        times = {name: finding.reports[name]["seconds"] * 1e6 for name in names}
        results = {name: Result(time=time, p50=time, rounds=[time]) for name, time in times.items()}
        case = Case(finding.collective, "sync", finding.world.ranks, "float32", finding.bytes, finding.bytes // 4)
        tuned.append(tune.Finding(finding.collective, finding.world.hosts, Row(case, results, None)))
    left = [one for one in tuned if (one.collective, one.row.case.ranks, one.hosts) not in _places(unknown)]
    left.sort(key=lambda one: (one.collective, one.row.case.ranks, one.hosts))
    for collective, world in sorted(unknown, key=str):
        place = f"{collective} of {world.ranks} ranks on {world.hosts} hosts"
        print(f"no row for {place}: not all its algorithms were simulated", file=sys.stderr)
    if not left:
        raise ValueError(f"{file}: not written: no collective had all its algorithms simulated, and several of them")
    rows = tune.table(left)
    tune.write(file, rows, f"simulated, {report.today()}")
    return rows


def _places(findings: set[tuple[str, World]]) -> set[tuple[str, int, int]]:
    return {(collective, world.ranks, world.hosts) for collective, world in findings}


def _as_json(
    parameters: str, options: argparse.Namespace, findings: Sequence[Finding], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    shown = [
        {
            "collective": finding.collective,
            "ranks": finding.world.ranks,
            "hosts": finding.world.hosts,
            "bytes": finding.bytes,
            "fastest": finding.fastest,
            "chosen": finding.chosen,
            "algorithms": finding.reports,
            "refused": finding.refused,
        }
        for finding in findings
    ]
    return {
        "schema": SCHEMA,
        "parameters": json.loads(parameters),
        "late": {str(rank): seconds for rank, seconds in options.late},
        "findings": shown,
        **({"file": str(options.output), "rows": list(rows)} if options.output is not None else {}),
    }


def _show(finding: Finding, before: Finding | None, is_late: bool) -> None:
    if before is None or (before.collective, before.world) != (finding.collective, finding.world):
        world = finding.world
        print(f"\n# simulated: {finding.collective}, {world.ranks} ranks, {world.hosts} host{'s' * (world.hosts > 1)}")
        print("# time in microseconds; what a rank sends, and a host to others: the most, and the mean")
        print(f"{'bytes':>10} {'algorithm':>18} {'time':>14}{_late_column(is_late)} {_names()}")
    for name, found in finding.reports.items():
        late = f" {found['late_costs'] * 1e6:>12.2f}" if is_late else ""
        line = f"{report.size_text(finding.bytes):>10} {name:>18} {found['seconds'] * 1e6:>14.2f}{late} "
        line += _cells(found)
        notes = ["fastest"] if name == finding.fastest else []
        notes += ["chosen"] if name == finding.chosen else []
        print((line + "  " + ", ".join(notes)).rstrip(), flush=True)
    for name, reason in finding.refused.items():
        print(f"{report.size_text(finding.bytes):>10} {name:>18} not simulated: {reason}", flush=True)


def _late_column(is_late: bool) -> str:
    return "   late costs" if is_late else ""


def _names() -> str:
    return " ".join(name.rjust(width) for name, width in zip(_COLUMNS.values(), _WIDTHS, strict=True))


def _cells(found: dict[str, float]) -> str:
    cells = [f"{found[column]:.1f}".removesuffix(".0") for column in _COLUMNS]
    return " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
