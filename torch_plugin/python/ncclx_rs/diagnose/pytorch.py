"""The engine's flight recorders in PyTorch's format, for its analyser and its debug server."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ncclx_rs import _trace
from ncclx_rs.diagnose.dumps import Dump, Record

# The analyser has other names for the first, and none for the rest.
_NAMES = {"window_register": "new_window", "all_gather_p": "all_gather"}
_UNKNOWN = {"window_deregister", "window_fence", "put", "get", "accumulate", "flush", "signal", "wait_signal"}
_STATES = {"queued": "scheduled", "running": "started", "failed": "started", "completed": "completed"}

PREFIX = "trace_"


def write(dumps: Iterable[Dump], folder: Path) -> list[Path]:
    """Writes a file ``trace_<rank>`` for each process, for ``torch.distributed.flight_recorder.fr_trace``.

    Args:
        dumps: of any number of ranks and communicators.
        folder: where to write; made if it is not there.

    Returns:
        The files' names.

    Raises:
        OSError: a file cannot be written.
    """
    by_rank: dict[int, list[Dump]] = defaultdict(list)
    for dump in dumps:
        by_rank[rank(dump)].append(dump)
    files = {folder / f"{PREFIX}{number}": trace(own) for number, own in sorted(by_rank.items())}
    for file, content in files.items():
        _trace.write(content, file)
    return list(files)


def rank(dump: Dump) -> int:
    """The job's rank of the process that left a dump."""
    return dump.members[dump.rank]


def trace(dumps: Iterable[Dump], include_completed: bool = True) -> dict[str, Any]:
    """One process's dumps in the format of PyTorch's recorder.

    Left out are accesses to windows, which the analyser does not know, and receives from any rank that have no message
    yet. The dtype of messages is bytes.

    Args:
        dumps: the dumps of the process's communicators.
        include_completed: whether completed operations are included.
    """
    dumps = sorted(dumps, key=lambda dump: (dump.communicator, dump.id))
    places = [(dump, device) for dump in dumps for device in _places(dump)]
    groups = [_group(number, *place) for number, place in enumerate(places)]
    operations = [
        (record, group, dump)
        for group, (dump, device) in zip(groups, places, strict=True)
        for record in dump.records
        if record.device is device
        if record.operation not in _UNKNOWN and (record.collective or record.peer is not None)
    ]
    operations.sort(key=lambda operation: operation[0].submitted)
    # Overwritten records count too: the analyser begins at the first number that all ranks still have.
    numbers = itertools.count(sum(dump.operations for dump in dumps) - len(operations))
    entries = [_entry(next(numbers), *operation) for operation in operations]
    return _trace.trace(groups, [entry for entry in entries if include_completed or entry.state != "completed"])


def _places(dump: Dump) -> list[bool]:
    """Where a communicator has operations: on the CPU, and perhaps on a device."""
    return [False, True] if any(record.device for record in dump.records) else [False]


def _group(number: int, dump: Dump, device: bool) -> _trace.Group:
    # The analyser takes entries of a group by number, and operations on a device have numbers of their own.
    name = f"{dump.communicator}-{dump.id[:8]}" + ("-cuda" if device else "")
    group = _trace.Group(number, name, "ncclx", None, dump.members)
    collectives = dump.collectives_on(device)
    group.collectives = max(map(_sequence, collectives), default=0) if device else dump.collectives
    group.started = max((_sequence(record) for record in collectives if record.started is not None), default=0)
    group.completed = max((_sequence(record) for record in collectives if record.state == "completed"), default=-1)
    return group


def _sequence(record: Record) -> int:
    """PyTorch counts from one, as devices do."""
    return record.sequence if record.device else record.sequence + 1


def _entry(number: int, record: Record, group: _trace.Group, dump: Dump) -> _trace.Entry:
    route = None
    sequence = _sequence(record)
    if record.peer is not None:
        here, there = rank(dump), dump.members[record.peer]
        route = (here, there) if record.operation == "send" else (there, here)
        group.messages[route] += 1
        sequence = group.messages[route]
    return _trace.Entry(
        record=number,
        group=group,
        op_id=record.number,
        name=_NAMES.get(record.operation, record.operation),
        route=route,
        sequence=sequence,
        inputs=_shapes(record, record.read),
        outputs=_shapes(record, record.written),
        created=1000 * record.submitted,
        started=None if record.started is None else 1000 * record.started,
        ended=None if record.ended is None else 1000 * record.ended,
        took=None if record.device_microseconds is None else 1000 * record.device_microseconds,
        state=_STATES[record.state],
        frames=record.stack,
    )


def _shapes(record: Record, count: int) -> _trace.Shapes:
    # A rank that reads or writes nothing has no tensor there, which is not the same as an empty tensor.
    if count == 0 and record.operation in ("barrier", "gather", "scatter", "send", "recv"):
        return []
    return [([count], _trace.dtype(record.dtype or "uint8"))]
