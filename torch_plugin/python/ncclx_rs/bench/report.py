"""Formats rows: as a table on the terminal, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ncclx_rs.bench.measure import Case, Plan, Result, Row

# The version of the JSON, raised when a reader would have to change.
SCHEMA = 1

_COLUMNS = ("bytes", "backend", "time", "p50", "p95", "p99", "alg", "bus", "cpu", "wrong")
_WIDTHS = (10, 10, 11, 11, 11, 11, 8, 8, 11, 6)


def size_text(size: int) -> str:
    """A number of bytes with the largest unit that divides it, as `--min` takes it."""
    for unit, shift in (("G", 30), ("M", 20), ("K", 10)):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)


def heading(case: Case) -> str:
    """The heading above the rows of one operation."""
    title = f"\n# {case.operation}, {case.mode}, {case.ranks} ranks, {case.dtype}"
    legend = "# times in microseconds a call, bandwidths in GB/s, wrong in elements"
    names = " ".join(name.rjust(width) for name, width in zip(_COLUMNS, _WIDTHS, strict=True))
    return f"{title}\n{legend}\n{names}   ratio [p10, p90]   of p50"


def lines(row: Row) -> str:
    """A row: one line for each backend, with the ratio at the end of the first."""
    shown = []
    for index, (name, result) in enumerate(row.results.items()):
        line = f"{size_text(row.case.bytes):>10} {name:>10} "
        line += f" not measured: {result.error}" if result.error else _numbers(result)
        if name in row.memory:
            line += f"   {row.memory[name]:.1%} of memory"
        if index == 0 and row.ratio is not None:
            line += f"   {row.ratio.median:.2f} [{row.ratio.p10:.2f}, {row.ratio.p90:.2f}]   {row.ratio.typical:.2f}"
        shown.append(line)
    return "\n".join(shown)


def _numbers(result: Result) -> str:
    values = (result.time, result.p50, result.p95, result.p99)
    bandwidths = (result.algorithm_bandwidth, result.bus_bandwidth)
    texts = [f"{value:.2f}" for value in values] + [f"{value:.3f}" for value in bandwidths]
    texts += [f"{result.cpu:.2f}", "-" if result.wrong is None else str(result.wrong)]
    return " ".join(text.rjust(width) for text, width in zip(texts, _WIDTHS[2:], strict=True))


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean, which is the mean of ratios.

    Raises:
        ValueError: there are no values, or one is not above 0.
    """
    if not values or min(values) <= 0:
        raise ValueError("geometric_mean: argument `values`: expected at least one, all above 0")
    return math.exp(sum(math.log(value) for value in values) / len(values))


def summary(rows: Sequence[Row], backends: Sequence[str]) -> str:
    """The ratios of all rows as Markdown: a table for each world, mode and type, with a column for each operation."""
    parts = []
    compared = [row for row in rows if row.ratio is not None]
    worlds = dict.fromkeys((row.case.ranks, row.case.mode, row.case.dtype) for row in compared)
    for ranks, mode, dtype in worlds:
        cells: dict[str, dict[int, float]] = {}
        for row in compared:
            if (row.case.ranks, row.case.mode, row.case.dtype) == (ranks, mode, dtype) and row.ratio is not None:
                cells.setdefault(row.case.operation, {})[row.case.bytes] = row.ratio.median
        sizes = sorted({size for column in cells.values() for size in column})
        table = [f"Time of {backends[1]} by time of {backends[0]}: {ranks} ranks, {mode}, {dtype}", ""]
        table.append("| bytes | " + " | ".join(cells) + " |")
        table.append("|---:" * (len(cells) + 1) + "|")
        for size in sizes:
            shown = [f"{column[size]:.2f}" if size in column else "" for column in cells.values()]
            table.append(f"| {size_text(size)} | " + " | ".join(shown) + " |")
        means = [f"{geometric_mean(list(column.values())):.2f}" for column in cells.values()]
        table.append("| geometric mean | " + " | ".join(means) + " |")
        parts.append("\n".join(table))
    return "\n\n".join(parts)


def today() -> datetime.date:
    """The date, by UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date()


def machine_today() -> str:
    """Where and when something was measured, for the note of a file."""
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores, {today()}"


def document(plan: Plan, rows: Sequence[Row], command: Sequence[str]) -> dict[str, Any]:
    """The content of the JSON: machine, plan and rows, with the fields of `Plan`, `Case`, `Result` and `Ratio`."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": list(command),
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            "device": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "ncclx_rs": importlib.metadata.version("ncclx_rs"),
        },
        "plan": dataclasses.asdict(plan),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def as_json(plan: Plan, rows: Sequence[Row], command: Sequence[str]) -> str:
    """`document` as JSON."""
    return json.dumps(document(plan, rows, command), indent=1)


def processor() -> str:
    """The model of this machine's processor."""
    try:
        names = [
            line.split(":", 1)[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
    except OSError:
        names = []
    return names[0].strip() if names else platform.machine()
