"""A timeline of communicators' operations, for chrome://tracing and https://ui.perfetto.dev.

The format is Chrome's Trace Event Format, JSON object variant.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ncclx_rs._comm import TorchComm
from ncclx_rs._types import OpName


class TimelineHook:
    """Collects when operations began and ended; a row a communicator, a process a rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._rows = 0

    def register_with_comm(self, comm: TorchComm) -> None:
        """Follows the communicator's operations from now on, and those of communicators split from it."""
        rank = comm.get_rank()
        with self._lock:
            self._rows += 1
            row = self._rows
            self._events.append(_label("process_name", rank, row, f"rank {rank}"))
            self._events.append(_label("thread_name", rank, row, comm.get_name()))
        began: dict[int, tuple[OpName, int]] = {}

        def before(name: OpName, op_id: int, args: Any) -> None:
            began[op_id] = (name, time.perf_counter_ns())

        def after(op_id: int, args: Any) -> None:
            child = getattr(args, "comm", None)
            if child is not None:
                self.register_with_comm(child)
            name, start = began.pop(op_id)
            event = {"name": name.name, "ph": "X", "pid": rank, "tid": row, "ts": start / 1000, "args": {"op": op_id}}

            def ended(_: object = None) -> None:
                with self._lock:
                    self._events.append(event | {"dur": (time.perf_counter_ns() - start) / 1000})

            parts = getattr(getattr(args, "work", None), "_parts", [])
            pending = [part for part in parts if isinstance(part, dist.Work) and not part.is_completed()]
            if pending:
                pending[-1].get_future().add_done_callback(ended)
            else:
                ended()

        comm.register_pre_hook(before)
        comm.register_post_hook(after)

    def events(self) -> list[dict[str, Any]]:
        """The events so far."""
        with self._lock:
            return list(self._events)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline to a file."""
        Path(path).write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ns"}))


def _label(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
