"""Writes the records of dumps as a trace for https://ui.perfetto.dev and chrome://tracing.

The format is the JSON object variant of Chrome's Trace Event Format: a process is a rank's process, a row is one of its
communicators. Operations that overlap lie in rows of one name. Times are those of the hosts' clocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ncclx_rs.diagnose.dumps import Communicator, Dump, Record


def write(communicators: Sequence[Communicator], path: Path) -> None:
    """Writes the trace.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps({"traceEvents": events(communicators), "displayTimeUnit": "ms"}))


def events(communicators: Sequence[Communicator]) -> list[dict[str, Any]]:
    """The events of all dumps, in an order that viewers do not depend on."""
    found: list[dict[str, Any]] = []
    for number, communicator in enumerate(communicators):
        for rank, dump in sorted(communicator.dumps.items()):
            process = dump.members[rank] if rank < len(dump.members) else rank
            found.append(_named("process_name", process, 0, f"rank {process}"))
            rows: list[int] = []  # when the last operation in each row ends
            for record in sorted(dump.records, key=lambda record: record.submitted):
                end = record.ended or dump.time
                row = next((row for row, free in enumerate(rows) if free <= record.submitted), len(rows))
                rows[row : row + 1] = [end]
                found.append(_event(record, dump, process, _row(number, row), end))
            found += [_named("thread_name", process, _row(number, row), communicator.name) for row in range(len(rows))]
    return found


def _row(communicator: int, row: int) -> int:
    """A number that no other row has: communicators of a process come one after the other."""
    return (communicator << 16) + row


def _event(record: Record, dump: Dump, process: int, row: int, end: int) -> dict[str, Any]:
    about = {"call": record.call, "state": record.state, "place": record.place, "host": dump.host}
    if record.started is not None:
        about["waited_us"] = record.started - record.submitted
    if record.device_microseconds is not None:
        about["device_us"] = record.device_microseconds
    if record.failure:
        about["failure"] = record.failure
    if record.stack:
        frame = record.stack[0]
        about["called_at"] = f"{frame['filename']}:{frame['line']} in {frame['name']}"
    return {
        "name": record.operation,
        "cat": "collective" if record.collective else "message",
        "ph": "X",
        "pid": process,
        "tid": row,
        "ts": record.submitted,
        "dur": max(end - record.submitted, 0),
        "args": about,
    }


def _named(what: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
