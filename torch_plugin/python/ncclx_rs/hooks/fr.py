"""A flight recorder: the last operations of communicators, for after something went wrong.

The dumps are those of PyTorch's own recorder, version 2.10, so its analyser reads them:

    python -m torch.distributed.flight_recorder.fr_trace -j DIRECTORY --prefix PREFIX
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import os
import pickle
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ncclx_rs._comm import TorchComm
from ncclx_rs._types import OpName
from ncclx_rs._work import TorchWork

VERSION = "2.10"

_P2P = (OpName.send, OpName.recv)
_NOT_RECORDED = (OpName.batch_op_issue, OpName.finalize)


@dataclass
class _Group:
    """A communicator that is watched."""

    number: int
    comm_name: str
    backend: str
    ranks: list[int]
    timeout_ms: int
    collectives: int = 0
    messages: int = 0
    enqueued: int = -1
    completed: int = -1


@dataclass
class _Entry:
    """One operation."""

    record: int
    group: _Group
    op_id: int
    name: OpName
    collective: int
    message: int
    inputs: list[torch.Size]
    input_dtypes: list[str]
    outputs: list[torch.Size]
    output_dtypes: list[str]
    created: int = field(default_factory=time.time_ns)
    finished: int | None = None
    thread: threading.Thread = field(default_factory=threading.current_thread)

    def as_dict(self) -> dict[str, Any]:
        done = {} if self.finished is None else {"duration_ms": (self.finished - self.created) / 1e6}
        return {
            "record_id": self.record,
            "pg_id": self.group.number,
            "process_group": [self.group.comm_name, self.group.backend],
            "collective_seq_id": self.collective,
            "p2p_seq_id": self.message,
            "op_id": self.op_id,
            "profiling_name": f"{self.group.backend}:{self.name.name}",
            "time_created_ns": self.created,
            **done,
            "input_sizes": [list(shape) for shape in self.inputs],
            "input_dtypes": self.input_dtypes,
            "output_sizes": [list(shape) for shape in self.outputs],
            "output_dtypes": self.output_dtypes,
            "state": "started" if self.finished is None else "completed",
            "time_discovered_started_ns": self.created,
            "time_discovered_completed_ns": self.finished,
            "retired": self.finished is not None,
            "timeout_ms": self.group.timeout_ms,
            "is_p2p": self.name in _P2P,
            "thread_id": str(self.thread.ident),
            "thread_name": self.thread.name,
        }


class _Recorder:
    """The memory of one or several hooks."""

    def __init__(self, max_entries: int) -> None:
        self._lock = threading.Lock()
        self._entries: collections.deque[_Entry] = collections.deque(maxlen=max_entries)
        self._groups: list[_Group] = []
        self._records = itertools.count()

    def add_group(self, comm: TorchComm) -> _Group:
        with self._lock:
            ranks = list(range(comm.get_size()))
            timeout = int(comm.get_options().timeout.total_seconds() * 1000)
            group = _Group(len(self._groups), comm.get_name(), comm.get_backend(), ranks, timeout)
            self._groups.append(group)
            return group

    def began(self, group: _Group, name: OpName, op_id: int, args: Any) -> _Entry:
        inputs, outputs = _operands(name, args)
        with self._lock:
            if name in _P2P:
                group.messages += 1
            else:
                group.collectives += 1
            sequence = group.enqueued = group.collectives
            entry = _Entry(
                next(self._records),
                group,
                op_id,
                name,
                sequence,
                group.messages,
                [tensor.shape for tensor in inputs],
                [_dtype(tensor.dtype) for tensor in inputs],
                [tensor.shape for tensor in outputs],
                [_dtype(tensor.dtype) for tensor in outputs],
            )
            self._entries.append(entry)
            return entry

    def ended(self, entry: _Entry) -> None:
        with self._lock:
            entry.finished = time.time_ns()
            entry.group.completed = max(entry.group.completed, entry.collective)

    def reset(self) -> None:
        with self._lock:
            self._entries.clear()

    def size(self) -> int:
        return len(self._entries)

    def dump(self, include_completed: bool) -> dict[str, Any]:
        with self._lock:
            entries = [entry.as_dict() for entry in self._entries if include_completed or entry.finished is None]
            names = {group.comm_name: group for group in self._groups}
            return {
                "version": VERSION,
                "comm_lib_version": "ncclx_rs",
                "pg_config": {
                    name: {"name": name, "desc": group.backend, "ranks": f"[{','.join(map(str, group.ranks))}]"}
                    for name, group in names.items()
                },
                "pg_status": {
                    str(group.number): {
                        "last_enqueued_collective": str(group.enqueued),
                        "last_started_collective": str(group.enqueued),
                        "last_completed_collective": str(group.completed),
                    }
                    for group in self._groups
                },
                "entries": entries,
            }


@functools.cache
def _shared(max_entries: int) -> _Recorder:
    return _Recorder(max_entries)


class FlightRecorderHook:
    """Remembers the last operations of the communicators it is registered with, and of those split from them.

    When an operation times out or a rank is lost, it writes what it remembers to the file that
    ``TORCHCOMM_FR_DUMP_TEMP_FILE`` names, before the communicator is aborted.
    """

    def __init__(self, max_entries: int | None = None, isolated: bool = False) -> None:
        """Makes a recorder.

        Args:
            max_entries: how many operations are remembered. The default is what ``TORCHCOMM_FR_BUFFER_SIZE`` or
                ``TORCH_FR_BUFFER_SIZE`` says, or 2000.
            isolated: whether the operations are kept apart from those of other recorders of this process.
        """
        if max_entries is None:
            size = os.environ.get("TORCHCOMM_FR_BUFFER_SIZE") or os.environ.get("TORCH_FR_BUFFER_SIZE")
            max_entries = int(size) if size else 2000
        self._recorder = _Recorder(max_entries) if isolated else _shared(max_entries)
        self._enabled = False
        self._rank = 0

    def register_with_comm(self, comm: TorchComm) -> None:
        """Records the communicator's operations from now on."""
        self._enabled = True
        self._rank = comm.get_rank()
        group = self._recorder.add_group(comm)
        running: dict[int, _Entry] = {}

        def before(name: OpName, op_id: int, args: Any) -> None:
            if name not in _NOT_RECORDED:
                running[op_id] = self._recorder.began(group, name, op_id, args)

        def after(op_id: int, args: Any) -> None:
            child = getattr(args, "comm", None)
            if child is not None:
                self.register_with_comm(child)
            entry = running.pop(op_id, None)
            if entry is not None:
                self._follow(entry, getattr(args, "work", TorchWork()))

        comm.register_pre_hook(before)
        comm.register_post_hook(after)
        comm.register_abort_hook(lambda: self.dump_file(self._rank) and None)

    def _follow(self, entry: _Entry, work: TorchWork) -> None:
        pending = [part for part in work._parts if isinstance(part, dist.Work) and not part.is_completed()]
        if pending:
            recorder = self._recorder
            pending[-1].get_future().add_done_callback(lambda _: recorder.ended(entry))
        elif work.exception() is None:
            self._recorder.ended(entry)

    def dump_json(self, include_completed: bool = True) -> str:
        """What is remembered, as JSON.

        Args:
            include_completed: whether operations that are done are included.
        """
        return json.dumps(self._recorder.dump(include_completed))

    def dump_file(self, rank: int, include_completed: bool = True) -> str:
        """Writes what is remembered to a file, as a pickle, and returns the file's name.

        The name is ``TORCHCOMM_FR_DUMP_TEMP_FILE`` (or ``TORCH_FR_DUMP_TEMP_FILE``, or
        ``~/.cache/torchcomm_fr_trace_``) with the rank behind it; without, if ``TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME``
        is set.

        Args:
            rank: this process's rank.
            include_completed: whether operations that are done are included.
        """
        default = str(Path.home() / ".cache" / "torchcomm_fr_trace_")
        prefix = os.environ.get("TORCHCOMM_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or default
        whole = os.environ.get("TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME", "0").lower() in ("1", "true", "yes", "y")
        path = Path(prefix if whole else f"{prefix}{rank}")
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            pickle.dump(self._recorder.dump(include_completed), file)
        return str(path)

    def reset(self) -> None:
        """Forgets every operation."""
        self._recorder.reset()

    def is_enabled(self) -> bool:
        """Whether it is registered with a communicator."""
        return self._enabled

    def size(self) -> int:
        """How many operations are remembered."""
        return self._recorder.size()


def _operands(name: OpName, args: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    def listed(operand: Any) -> list[torch.Tensor]:
        return [operand] if isinstance(operand, torch.Tensor) else list(operand or [])

    if hasattr(args, "tensor"):
        tensor = [args.tensor]
        return ([] if name is OpName.recv else tensor), ([] if name is OpName.send else tensor)
    return listed(getattr(args, "input", None)), listed(getattr(args, "output", None))


def _dtype(dtype: torch.dtype) -> str:
    """As PyTorch's C++ side calls it, which is what its analyser knows."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name.capitalize())


_DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "uint64": "UInt64",
    "complex32": "ComplexHalf",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
