"""Runs one probe: `probe.py P3` prints what it found as a line of JSON.

The exit code is 0 if the probe ended, whatever it found, and 1 if it broke.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import probes_memory
import probes_order
import probes_torch
from probing import NotHere, Probe


def all_probes() -> dict[str, Probe]:
    """The probes by name, in the order of their numbers."""
    found = [*probes_memory.PROBES, *probes_order.PROBES, *probes_torch.PROBES]
    return {probe.name: probe for probe in sorted(found, key=lambda probe: int(probe.name[1:]))}


def main(name: str) -> None:
    try:
        found = dataclasses.asdict(all_probes()[name].run())
    except NotHere as reason:
        found = {"not_here": str(reason)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
