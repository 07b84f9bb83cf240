"""Measures what two cores of this host can exchange through memory: `ncclx-rs bench --link`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ncclx_rs import _host
from ncclx_rs._native import measure_link

# The version of the JSON, raised when a reader would have to change.
SCHEMA = 1

# Numbers of cores are below this one.
_CORES_MAX = 1 << 32

# Pages of memory are of this size.
_PAGE_BYTES = 4096

_RATES = {
    "write_shared": "write lines that both cores hold",
    "write_owned": "write lines that the reader owns",
    "read": "read written lines",
    "read_owning": "read written lines, and own them",
    "memcpy": "copy memory that no cache holds",
}


def cores(text: str) -> tuple[int, int] | None:
    """The numbers of two cores from a text such as ``0,2``; None, of the first two, from an empty one.

    Raises:
        argparse.ArgumentTypeError: it is no such text.
    """
    if not text:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) < _CORES_MAX for part in parts):
        raise argparse.ArgumentTypeError(f"expected the numbers of two cores such as 0,1, got {text!r}")
    return int(parts[0]), int(parts[1])


def measure(cpus: tuple[int, int] | None) -> dict[str, Any]:
    """The figures of the link between two cores, of the first two that this process may run on if not given.

    Raises:
        OSError: there is one core, or this process may not run on one of them.
    """
    if cpus is None:
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < 2:
            raise OSError(f"this process may run on one core alone, {usable[0]}")
        cpus = usable[0], usable[1]
    return {"schema": SCHEMA, "cpus": list(cpus), **_place(cpus), **dict(measure_link(*cpus))}


def _place(cpus: tuple[int, int], root: Path = _host.ROOT) -> dict[str, Any]:
    """The NUMA nodes of two cores, and how far they are from each other; None where the kernel does not tell."""
    nodes = _host.nodes(root)
    places = [next((place for place, node in enumerate(nodes) if node.has(cpu)), None) for cpu in cpus]
    writer, reader = places
    distances = [] if writer is None or reader is None else nodes[writer].distances
    return {
        "nodes": [None if place is None else nodes[place].number for place in places],
        "distance": distances[reader] if reader is not None and reader < len(distances) else None,
    }


def table(link: dict[str, Any]) -> str:
    """The figures as lines."""
    memcpy = link["memcpy"]
    writer, reader = link["cpus"]
    where = ""
    if link["distance"] is not None:
        where = f", NUMA nodes {link['nodes'][0]} and {link['nodes'][1]} at distance {link['distance']}"
    lines = [
        f"# link from core {writer} to core {reader}{where}: rates in GB/s, and as shares of memcpy's",
        f"{'round trip of a line':36} {link['round_trip']:8.0f} ns",
    ]
    lines += [f"{text:36} {link[name]:8.2f} GB/s {link[name] / memcpy:7.2f}" for name, text in _RATES.items()]
    page = link["page"]
    if page is None:
        lines.append("this process may not read another one's memory; ncclx-rs doctor says why")
    else:
        rate = _PAGE_BYTES / page
        text = "read a page of another process"
        lines.append(f"{text:36} {rate:8.2f} GB/s {rate / memcpy:7.2f}   {page:.0f} ns a page")
    return "\n".join(lines)
