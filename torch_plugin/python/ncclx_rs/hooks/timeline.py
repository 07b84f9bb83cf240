"""A timeline of communicators' operations, for chrome://tracing and https://ui.perfetto.dev.

    timeline = TimelineHook(f"rank{comm.get_rank()}.json")
    timeline.register_with_comm(comm)

The format is the JSON object variant of Chrome's Trace Event Format: a process is a rank, a row is a communicator.
Times are those of the host's clock, so the files of ranks of one host fit together.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import json
import os
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ncclx_rs._comm import TorchComm
from ncclx_rs._types import OpName
from ncclx_rs._work import TorchWork
from ncclx_rs.hooks._observer import Observer, observe


@dataclass(eq=False)
class _Operation:
    name: OpName
    op_id: int
    bytes: int
    lane: int
    process: int
    row: int
    start: int = field(default_factory=time.perf_counter_ns)

    def event(self, epoch: int) -> dict[str, Any]:
        """The event of the operation while it is in flight."""
        return {
            "name": self.name.name,
            "cat": "collective",
            "ph": "B",
            "pid": self.process,
            "tid": self.row,
            "ts": (self.start + epoch) / 1000,
            "args": {"op": self.op_id, "bytes": self.bytes},
        }


class TimelineHook:
    """Records when operations began and ended, on its communicators and on those split from them.

    An asynchronous operation lasts from its issue until it is done. Operations that overlap get additional rows below
    the communicator's.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, max_events: int = 100_000) -> None:
        """Makes an empty timeline.

        Args:
            path: the file to write whenever a communicator is finalized or fails.
            max_events: how many operations are kept, the last ones.
        """
        self._path = path
        self._lock = threading.Lock()
        self._labels: list[dict[str, Any]] = []
        self._events: collections.deque[dict[str, Any]] = collections.deque(maxlen=max_events)
        self._in_flight: set[_Operation] = set()
        self._rows = itertools.count()
        self._epoch = time.time_ns() - time.perf_counter_ns()

    def register_with_comm(self, comm: TorchComm) -> None:
        """Records the communicator's operations from now on."""
        observe(comm, _CommRows(self, comm))

    def events(self) -> list[dict[str, Any]]:
        """The events so far: labels (``"ph": "M"``), ended operations (``"X"``) and operations in flight (``"B"``)."""
        with self._lock:
            return [*self._labels, *self._events, *(operation.event(self._epoch) for operation in self._in_flight)]

    def save(self, path: str | os.PathLike[str] | None = None) -> None:
        """Writes the timeline to a file.

        Args:
            path: the file; the hook's own if not given.

        Raises:
            ValueError: neither the hook nor the call has a path.
            OSError: the file cannot be written.
        """
        chosen = self._path if path is None else path
        if chosen is None:
            raise ValueError("TimelineHook: neither the hook nor `save` was given a path")
        Path(chosen).write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ns"}))

    def _label(self, kind: str, process: int, row: int, **args: Any) -> None:
        with self._lock:
            self._labels.append({"name": kind, "ph": "M", "pid": process, "tid": row, "args": args})

    def _begin(self, operation: _Operation) -> None:
        with self._lock:
            self._in_flight.add(operation)

    def _end(self, operation: _Operation, succeeded: bool) -> None:
        event = operation.event(self._epoch)
        event["args"]["succeeded"] = succeeded
        event |= {"ph": "X", "dur": (time.perf_counter_ns() - operation.start) / 1000}
        with self._lock:
            self._in_flight.discard(operation)
            self._events.append(event)

    def _discard(self, operation: _Operation) -> None:
        with self._lock:
            self._in_flight.discard(operation)


class _CommRows(Observer[_Operation]):
    """The rows of one communicator. Each operation takes the first row without an operation in flight."""

    def __init__(self, timeline: TimelineHook, comm: TorchComm) -> None:
        self._timeline = timeline
        self._comm = weakref.proxy(comm)
        self._lock = threading.Lock()
        self._rows: list[int] = []
        self._free: list[int] = []

    def on_call(self, name: OpName, op_id: int, args: Any) -> _Operation:
        process = self._process()
        with self._lock:
            lane = heapq.heappop(self._free) if self._free else self._new_row(process)
        operation = _Operation(name, op_id, _bytes(args), lane, process, self._rows[lane])
        self._timeline._begin(operation)
        return operation

    def on_issued(self, operation: _Operation, work: TorchWork) -> None:
        def ended(succeeded: bool) -> None:
            self._timeline._end(operation, succeeded)
            self._leave_row(operation)

        work._on_end(ended)

    def on_refused(self, operation: _Operation) -> None:
        self._timeline._discard(operation)
        self._leave_row(operation)

    def on_split(self, child: TorchComm) -> None:
        self._timeline.register_with_comm(child)

    def on_aborted(self) -> None:
        self.on_finalized()

    def on_finalized(self) -> None:
        if self._timeline._path is not None:
            try:
                self._timeline.save()
            except OSError as error:
                print(f"ncclx_rs: the timeline could not be written: {error}", file=sys.stderr, flush=True)

    def _process(self) -> int:
        return int(self._comm._members[self._comm.get_rank()])

    def _leave_row(self, operation: _Operation) -> None:
        with self._lock:
            heapq.heappush(self._free, operation.lane)

    def _new_row(self, process: int) -> int:
        row, lane = next(self._timeline._rows), len(self._rows)
        name = self._comm.get_name() if lane == 0 else f"{self._comm.get_name()}, overlapping {lane}"
        self._timeline._label("process_name", process, row, name=f"rank {process}")
        self._timeline._label("thread_name", process, row, name=name)
        self._timeline._label("thread_sort_index", process, row, sort_index=row)
        self._rows.append(row)
        return lane


def _bytes(args: Any) -> int:
    """The bytes that an operation reads; if it reads none, the bytes that it writes."""
    for name in ("tensor", "input", "output"):
        operand = getattr(args, name, None)
        tensors = [operand] if isinstance(operand, torch.Tensor) else operand
        if tensors:
            return sum(tensor.nbytes for tensor in tensors)
    return sum(op.tensor.nbytes for op in getattr(args, "ops", []))
