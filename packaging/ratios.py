"""The picture of README.md: how many times faster than gloo collectives are, as bars, from a table of figures.

python packaging/ratios.py    # from docs/performance.md into docs/ratios.svg
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Colours that stand out on light and dark pages.
COLOURS = ("#2f80c8", "#d9822b")
GREY = "#808890"
WIDTH, LEFT, BAR, GAP, TOP = 760, 120, 13, 12, 34


def table(text: str) -> tuple[list[str], dict[int, list[float]]]:
    """The names of the collectives in docs/performance.md, and for each number of ranks the ratios against gloo."""
    (head,) = re.findall(r"^\| against \| ranks \| (.*) \|$", text, re.MULTILINE)
    rows = re.findall(r"^\| gloo \| (\d+) \| (.*) \|$", text, re.MULTILINE)
    return head.split(" | "), {int(ranks): [float(ratio) for ratio in ratios.split(" | ")] for ranks, ratios in rows}


def picture(names: list[str], ratios: dict[int, list[float]]) -> str:
    """The picture, in SVG."""
    scale = (WIDTH - LEFT - 60) / max(max(row) for row in ratios.values())
    group = BAR * len(ratios) + GAP
    height = TOP + group * len(names) + 4
    one = LEFT + scale
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{described(names, ratios)}</title>",
    ]
    for number, (ranks, colour) in enumerate(zip(ratios, COLOURS, strict=True)):
        x = LEFT + 90 * number
        parts.append(f'<rect x="{x}" y="8" width="{BAR}" height="{BAR}" fill="{colour}"/>')
        parts.append(f'<text x="{x + BAR + 6}" y="19" fill="{GREY}">{ranks} ranks</text>')
    parts.append(f'<text x="{LEFT + 200}" y="19" fill="{GREY}">times faster than gloo, which is the dashed line</text>')
    for row, name in enumerate(names):
        y = TOP + row * group
        middle = y + BAR * len(ratios) / 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{middle:g}" text-anchor="end" fill="{GREY}">{name}</text>')
        for number, (values, colour) in enumerate(zip(ratios.values(), COLOURS, strict=True)):
            width, top = round(values[row] * scale, 1), y + number * BAR
            parts.append(f'<rect x="{LEFT}" y="{top}" width="{width}" height="{BAR - 1}" fill="{colour}"/>')
            end = round(LEFT + width + 5, 1)
            parts.append(f'<text x="{end}" y="{top + BAR - 2}" fill="{GREY}">{values[row]}</text>')
    parts.append(f'<path d="M{one:.1f} {TOP - 4}V{height - 8}" stroke="{GREY}" stroke-dasharray="3 3"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def described(names: list[str], ratios: dict[int, list[float]]) -> str:
    """The figures in words, for who does not see the picture."""
    rows = (
        f"on {ranks} ranks " + ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))
        for ranks, values in ratios.items()
    )
    return "times faster than gloo: " + "; ".join(rows)


if __name__ == "__main__":
    (ROOT / "docs/ratios.svg").write_text(picture(*table((ROOT / "docs/performance.md").read_text())))
