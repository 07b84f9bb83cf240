"""Draws rows with matplotlib, which the extra `bench` installs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ncclx_rs.bench.measure import Row
from ncclx_rs.bench.report import size_text

FORMATS = (".svg", ".png")


class NoMatplotlib(Exception):
    """matplotlib is not installed."""

    def __init__(self) -> None:
        """The error, with what to install."""
        super().__init__("plots need matplotlib: pip install matplotlib")


def check(path: Path) -> None:
    """Checks, before hours of measuring, that `draw` can write this file.

    Raises:
        NoMatplotlib: matplotlib is not installed.
        ValueError: the file's name does not end in one of `FORMATS`.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"--plot: expected a file name that ends in {' or '.join(FORMATS)}, got {path}")
    _matplotlib()


def _matplotlib() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise NoMatplotlib from error
    matplotlib.use("Agg")
    # Text stays text with one short list of fonts, and equal rows give equal files.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "ncclx_rs", "font.sans-serif": ["DejaVu Sans"], "font.size": 8}
    )
    return importlib.import_module("matplotlib.pyplot")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the time of a call over its size, in one panel for each operation, mode, world and type.

    Args:
        rows: The measured rows. Rows without a size, which are barriers, are not drawn.
        path: The file, an SVG or PNG.

    Raises:
        NoMatplotlib: matplotlib is not installed.
        ValueError: there is nothing to draw.
    """
    plt = _matplotlib()
    panels: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in rows:
        if row.case.bytes:
            case = row.case
            panels.setdefault((case.operation, case.mode, case.ranks, case.dtype), []).append(row)
    if not panels:
        raise ValueError("--plot: no row has a size")
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    figure, grid = plt.subplots(height, columns, figsize=(3.4 * columns, 2.6 * height), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (title, members) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, title, members)
    grid.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _panel(axes: Any, title: tuple[str, str, int, str], rows: Sequence[Row]) -> None:
    operation, mode, ranks, dtype = title
    axes.set_title(f"{operation}, {mode}, {ranks} ranks, {dtype}", fontsize=8)
    for name in rows[0].results:
        points = [(row.case.bytes, row.results[name]) for row in rows if not row.results[name].error]
        sizes = [size for size, _ in points]
        (line,) = axes.plot(sizes, [result.time for _, result in points], label=name)
        low, high = [min(result.rounds) for _, result in points], [max(result.rounds) for _, result in points]
        axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda size, _: size_text(int(size)))
    axes.set_xlabel("bytes")
    axes.set_ylabel("microseconds")
    axes.minorticks_off()
    axes.locator_params(numticks=5)
    axes.grid(True, alpha=0.3)
