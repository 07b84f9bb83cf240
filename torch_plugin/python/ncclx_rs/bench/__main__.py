"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException

from ncclx_rs.bench import launch, link, measure, plot, report
from ncclx_rs.bench.measure import DTYPES, MODES, Plan, Row
from ncclx_rs.bench.operations import OPERATIONS
from ncclx_rs.bench.progress import Progress

# The exit codes.
FAILED, SLOWER = 1, 3

_EPILOG = """\
exit codes: 0; 1 a result was wrong, the backend under test could not do an operation, or a rank failed;
2 the command line is wrong; 3 a row is slower than --fail-below allows.

Without a launcher the tool starts the ranks itself, on this host. Under torchrun, which --ranks does not go with, it
measures the world that torchrun has started; `--` keeps torchrun from reading the tool's options:
    torchrun --nproc-per-node 2 --module -- ncclx_rs.bench --max 1M
"""

Item = TypeVar("Item")


def parse_size(text: str) -> int:
    """A number of bytes from a number with an optional K, M or G, which are powers of 1024.

    Raises:
        argparse.ArgumentTypeError: the text is no such number, or not above 0.
    """
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in ("K", "M", "G") else (text, "")
    if not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 8, 64K or 1M, got {text!r}")
    return int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[unit]


def names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A reader of lists of names for `argparse`; ``all`` stands for every one of ``known``."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(known) if text == "all" else tuple(dict.fromkeys(text.split(",")))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; expected all, or some of {','.join(known)}"
            )
        return names

    return parse


def rank_list(text: str) -> tuple[int, ...]:
    """Numbers of ranks from a list with commas.

    Raises:
        argparse.ArgumentTypeError: one of them is not a number above 0.
    """
    if not all(part.isdecimal() and int(part) > 0 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected numbers of ranks such as 2,4,8, got {text!r}")
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def above(kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    """A reader of numbers for `argparse`, of at least ``least``."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= least:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least:g}, got {text!r}")
        return value

    return parse


def check_output(made: argparse.ArgumentParser, option: str, file: Path) -> None:
    """Ends the program, before hours of measuring, if a file cannot be written; what it holds stays."""
    is_new = not file.exists()
    if not (is_new or file.is_file() or file.is_dir()):
        return  # who reads from a pipe would take this for its end
    try:
        file.open("ab").close()
        if is_new:
            file.resolve().unlink()  # not a link to it
    except OSError as error:
        made.error(f"{option}: {error}")


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(
        prog="ncclx-rs bench",
        description="Measures the collectives of a c10d backend, alone or against another in the same run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = made.add_argument_group("what to measure; lists are separated by commas, or the word all")
    what.add_argument("--backend", default="ncclx_rs", help="the c10d backend under test (ncclx_rs)")
    what.add_argument("--vs", metavar="BACKEND", help="another one to compare it with, in alternating rounds")
    what.add_argument("--ops", type=names_of(list(OPERATIONS)), default="all", help=f"{', '.join(OPERATIONS)} (all)")
    what.add_argument("--min", type=parse_size, default="8", help="the smallest size in bytes; K, M, G (8)")
    what.add_argument("--max", type=parse_size, default="64M", help="the largest size (64M)")
    what.add_argument("--factor", type=above(int, 2), default=2, help="from one size to the next (2)")
    what.add_argument("--dtypes", type=names_of(list(DTYPES)), default="float32", help=f"{', '.join(DTYPES)} (float32)")
    what.add_argument("--modes", type=names_of(MODES), default="sync", help="sync, async (sync)")
    what.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors are: cpu, cuda (cpu)")
    what.add_argument("--ranks", type=rank_list, help="the sizes of the worlds to start, as in 2,4,8 (2)")
    what.add_argument(
        "--link",
        nargs="?",
        const="",
        type=link.cores,
        default=False,
        metavar="A,B",
        help="measure what two cores exchange through memory instead; goes with --json alone (the first two cores)",
    )
    how = made.add_argument_group("how long")
    how.add_argument("--rounds", type=above(int, 1), default=15, help="rounds of a row (15)")
    how.add_argument("--round-ms", type=above(float, 0.001), default=10.0, help="milliseconds of a backend's turn (10)")
    how.add_argument("--calls", type=above(int, 1), help="calls in a turn, instead of --round-ms")
    how.add_argument(
        "--warmup",
        type=above(int, 1),
        default=5,
        help="calls in each of three turns before a row's first round (5)",
    )
    how.add_argument("--depth", type=above(int, 1), default=4, help="operations in flight in mode async (4)")
    how.add_argument("--timeout", type=above(float, 0.001), default=120.0, help="an operation's limit in seconds (120)")
    how.add_argument("--pin", action="store_true", help="keep each rank's calling thread on a core of its own")
    how.add_argument("--no-check", action="store_true", help="do not check results")
    out = made.add_argument_group("what comes out beside the table")
    out.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="all numbers; printed instead of the table without FILE"
    )
    out.add_argument("--plot", type=Path, metavar="FILE", help="times over sizes, as .svg or .png; needs matplotlib")
    out.add_argument("--fail-below", type=above(float, 0.0), metavar="R", help="exit with 3 if a ratio is below R")
    return made


def sizes_between(least: int, most: int, factor: int) -> tuple[int, ...]:
    """The sizes from `least` up to `most`; each is the one before times the factor."""
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan of these options."""
    return Plan(
        backends=(options.backend,) if options.vs is None else (options.backend, options.vs),
        operations=options.ops,
        sizes=sizes_between(options.min, options.max, options.factor),
        dtypes=options.dtypes,
        modes=options.modes,
        rounds=options.rounds,
        round_seconds=options.round_ms / 1e3,
        calls=options.calls,
        warmup=options.warmup,
        depth=options.depth,
        check=not options.no_check,
        timeout=options.timeout,
        pin=options.pin,
        device=options.device,
    )


def verdict(rows: Sequence[Row], fail_below: float | None) -> tuple[int, list[str]]:
    """The exit code for these rows, and its reasons."""
    broken, slow = [], []
    for row in rows:
        label = (
            f"{row.case.operation}, {row.case.mode}, {row.case.ranks} ranks, {row.case.dtype}, {row.case.bytes} bytes"
        )
        for index, (name, result) in enumerate(row.results.items()):
            if result.wrong:
                broken.append(f"{label}: {result.wrong} wrong elements on {name}")
            if result.error and index == 0:
                broken.append(f"{label}: {name} failed: {result.error}")
        if fail_below is not None and row.ratio is not None and row.ratio.median < fail_below:
            slow.append(f"{label}: ratio {row.ratio.median:.2f} is below {fail_below:g}")
    return FAILED if broken else SLOWER if slow else 0, broken + slow


class Screen:
    """The terminal of rank 0: rows on the standard output, a progress bar on the standard error if it is a terminal."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        """Shows a bar of so many rows; if ``quiet``, the rows themselves are not printed."""
        self._progress = Progress(total, unit="row")
        self._quiet = quiet
        self._above: tuple[Any, ...] | None = None

    def show(self, row: Row) -> None:
        """Prints a row, under a heading where a new operation begins."""
        case = row.case
        above = (case.operation, case.mode, case.ranks, case.dtype)
        text = report.lines(row) if above == self._above else f"{report.heading(case)}\n{report.lines(row)}"
        self._above = above
        if not self._quiet:
            with self._progress.aside():
                print(text, flush=True)
        self._progress.step()

    def close(self) -> None:
        """Removes the progress bar."""
        self._progress.close()


def _rows(plan: Plan, worlds: Sequence[int]) -> Iterator[Row]:
    for ranks in worlds:
        yield from launch.run_world(plan, ranks, measure.run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Args:
        arguments: The command line without the program; that of the process if not given.

    Returns:
        The exit code.
    """
    made = parser()
    return execute(made.parse_args(arguments), made)


def execute(options: argparse.Namespace, made: argparse.ArgumentParser) -> int:
    """Runs the benchmark of these options; returns the exit code."""
    if launch.is_writer():
        json_file = None if options.json in (None, "-") else Path(options.json)
        for option, file in (("--json", json_file), ("--plot", options.plot)):
            if file is not None:
                check_output(made, option, file)
    if options.link is not False:
        return _link(options, made)
    if options.min > options.max:
        made.error(f"--min: expected at most --max, which is {options.max}, got {options.min}")
    known = [backend for backend in dist.Backend.backend_list if backend != dist.Backend.UNDEFINED]
    for option, backend in (("--backend", options.backend), ("--vs", options.vs)):
        if backend is not None and backend not in known:
            made.error(f"{option}: expected one of {', '.join(known)}, got {backend}")
    if options.device == "cuda" and not torch.cuda.is_available():
        made.error("--device: PyTorch finds no CUDA device; ncclx-rs info says what is here")
    if options.vs == options.backend:
        made.error(f"--vs: expected another backend than --backend, got {options.vs}")
    if options.fail_below is not None and options.vs is None:
        made.error("--fail-below: needs --vs, whose times are compared")
    if launch.launched() and options.ranks is not None:
        made.error("--ranks: the launcher has decided it; leave it away under torchrun")
    if options.plot is not None:
        try:
            plot.check(options.plot)
        except (plot.NoMatplotlib, ValueError) as error:
            made.error(str(error))
    plan = plan_of(options)
    if launch.launched():
        rank, ranks, rows = launch.run_here(plan, measure.run)
        worlds: Sequence[int] = (ranks,)
        if rank != 0:
            return sum(1 for _ in rows)  # none: rank 0 has all
    else:
        worlds = options.ranks or (2,)
        rows = _rows(plan, worlds)
    return _report(plan, worlds, rows, options, sys.argv)


def _link(options: argparse.Namespace, made: argparse.ArgumentParser) -> int:
    for name, value in vars(made.parse_args([])).items():
        if name not in ("link", "json") and getattr(options, name) != value:
            made.error(f"--{name.replace('_', '-')}: does not go with --link, which measures no collectives")
    try:
        found = link.measure(options.link)
    except OSError as error:
        made.error(f"--link: {error}")
    print(json.dumps(found) if options.json == "-" else link.table(found))
    if options.json not in (None, "-"):
        Path(options.json).write_text(json.dumps(found) + "\n")
    return 0


def _report(
    plan: Plan, worlds: Sequence[int], rows: Iterator[Row], options: argparse.Namespace, command: Sequence[str]
) -> int:
    measured: list[Row] = []
    only_json = options.json == "-"
    screen = Screen(sum(len(plan.rows(ranks)) for ranks in worlds), quiet=only_json)
    try:
        for row in rows:
            measured.append(row)
            screen.show(row)
    except ProcessException as error:
        print(error, file=sys.stderr)
        return FAILED
    finally:
        screen.close()
    if not measured:
        print(f"nothing to measure: {', '.join(plan.operations)} need more ranks than {max(worlds)}", file=sys.stderr)
        return FAILED
    if options.vs is not None and not only_json:
        print("\n" + report.summary(measured, plan.backends))
    if only_json:
        print(report.as_json(plan, measured, command))
    elif options.json is not None:
        Path(options.json).write_text(report.as_json(plan, measured, command) + "\n")
    if options.plot is not None:
        plot.draw(measured, options.plot)
    code, reasons = verdict(measured, options.fail_below)
    for reason in reasons:
        print(reason, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
