"""PyTorch's format of flight recorders, version 2.10, for PyTorch's analyser and debug server."""

from __future__ import annotations

import collections
import os
import pickle
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = "2.10"

# The sender of a message that is received from any rank.
ANY_RANK = -1

# Shape and type of tensors.
Shapes = list[tuple[list[int], str]]


@dataclass(eq=False)
class Group:
    """A recorded communicator.

    Attributes:
        number: distinguishes it from others of the same name.
        comm_name: its name.
        backend: its backend's name.
        timeout_ms: its timeout, if known.
        members: the job's numbers of its ranks.
        collectives: the number of collectives called.
        started: the number of collectives that began.
        completed: the number of the last completed collective; -1 if there is none.
        messages: the number of messages, by sender and receiver.
    """

    number: int
    comm_name: str
    backend: str
    timeout_ms: int | None
    members: list[int]
    collectives: int = 0
    started: int = 0
    completed: int = -1
    messages: collections.Counter[tuple[int, int]] = field(default_factory=collections.Counter)


@dataclass(eq=False)
class Entry:
    """One operation, or one message of a batch. Times are nanoseconds of Unix time.

    Attributes:
        record: its number in the recorder.
        group: its communicator.
        op_id: the operation's number.
        name: the operation's name.
        route: a message's sender, which may be `ANY_RANK`, and its receiver, by the job's numbers.
        sequence: the number of the collective in the communicator, or of the message on its route.
        inputs: shape and dtype of each tensor that it reads.
        outputs: shape and dtype of each tensor that it writes.
        created: the time of the call.
        started: the time when it began.
        ended: the time when it ended.
        took: how many nanoseconds it took, if its device's clock has told.
        state: scheduled, started or completed.
        thread: the calling thread's number and name, if known.
        frames: the stack of the call, the innermost frame first, each with name, filename and line.
    """

    record: int
    group: Group
    op_id: int
    name: str
    route: tuple[int, int] | None
    sequence: int
    inputs: Shapes
    outputs: Shapes
    created: int
    started: int | None
    ended: int | None = None
    took: float | None = None
    state: str = "started"
    thread: tuple[int, str] | None = None
    frames: list[dict[str, Any]] = field(default_factory=list)

    @property
    def section(self) -> tuple[str, list[int]]:
        """Name and ranks of the section in which the analyser compares the entry.

        For a collective, the section is the communicator. The analyser takes the entries of a section by number, and
        expects each from every rank. A message concerns two ranks, so each direction between two ranks is a section. A
        receive from any rank is the receiver's alone.
        """
        if self.route is None:
            return self.group.comm_name, self.group.members
        sender, receiver = self.route
        if sender == ANY_RANK:
            return f"{self.group.comm_name} ?->{receiver}", [receiver]
        return f"{self.group.comm_name} {sender}->{receiver}", sorted({sender, receiver})

    def as_dict(self) -> dict[str, Any]:
        """The entry in a trace."""
        section, ranks = self.section
        name = f"{self.group.backend}:{self.name}"
        if self.route is not None:  # "send 0->1", "recv 1<-0" or "recv 0<-?", by position among the section's ranks
            sender, receiver = ("?" if rank == ANY_RANK else ranks.index(rank) for rank in self.route)
            name += f" {sender}->{receiver}" if self.name == "send" else f" {receiver}<-{sender}"
        known: dict[str, Any] = {}
        if self.state == "completed" and self.started is not None and self.ended is not None:
            known["duration_ms"] = (self.ended - self.started if self.took is None else self.took) / 1e6
        if self.group.timeout_ms is not None:
            known["timeout_ms"] = self.group.timeout_ms
        if self.thread is not None:
            known |= {"thread_id": str(self.thread[0]), "thread_name": self.thread[1]}
        if self.frames:
            known["frames"] = self.frames
        return known | {
            "record_id": self.record,
            "pg_id": self.group.number,
            "process_group": [section, self.group.backend],
            "collective_seq_id": self.sequence,
            "p2p_seq_id": 0 if self.route is None else self.sequence,
            "op_id": self.op_id,
            "profiling_name": name,
            "time_created_ns": self.created,
            "input_sizes": [shape for shape, _ in self.inputs],
            "input_dtypes": [dtype for _, dtype in self.inputs],
            "output_sizes": [shape for shape, _ in self.outputs],
            "output_dtypes": [dtype for _, dtype in self.outputs],
            "state": self.state,
            "time_discovered_started_ns": self.started,
            "time_discovered_completed_ns": self.ended if self.state == "completed" else None,
            "retired": self.ended is not None,
            "is_p2p": self.route is not None,
        }


def trace(groups: Iterable[Group], entries: Sequence[Entry]) -> dict[str, Any]:
    """A process's trace in the format of PyTorch's recorder."""
    known = {group.number: group for group in [*groups, *(entry.group for entry in entries)]}
    sections = [(group.comm_name, group.members, group) for group in known.values()]
    sections += [(*entry.section, entry.group) for entry in entries]
    return {
        "version": VERSION,
        "comm_lib_version": "ncclx_rs",
        "pg_config": {
            name: {"name": name, "desc": group.backend, "ranks": f"[{','.join(map(str, ranks))}]"}
            for name, ranks, group in sections
        },
        "pg_status": {
            str(group.number): {
                "last_enqueued_collective": str(group.collectives or -1),
                "last_started_collective": str(group.started or -1),
                "last_completed_collective": str(group.completed),
            }
            for group in known.values()
        },
        "entries": [entry.as_dict() for entry in entries],
    }


def write(trace: dict[str, Any], path: Path) -> None:
    """Writes a trace for the analyser, as a pickle that only the file's owner can read.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = pickle.dumps(trace)
    with _writing:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)


def path(rank: int) -> Path:
    """The file of a process's trace, from the environment variables of PyTorch and torchcomms.

    Raises:
        RuntimeError: no variable names it, and there is no home folder.
    """
    files = ("TORCHCOMM_FR_DUMP_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    prefix = first(*files) or str(Path.home() / ".cache" / "torchcomm_fr_trace_")
    whole = first("TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME", "TORCH_FR_DUMP_DYNAMIC_FILE_NAME")
    return Path(prefix if is_true(whole) else f"{prefix}{rank}")


def dumps_on_failure() -> bool:
    """Whether a trace is written at a failure, from the environment variables of PyTorch."""
    return is_true(first("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT") or "true")


def first(*variables: str) -> str:
    """The value of the first environment variable that is set, or an empty text."""
    return next((text for text in map(os.environ.get, variables) if text), "")


def is_true(text: str) -> bool:
    """Whether the value of a variable means yes."""
    return text.lower() in ("1", "true", "yes", "y")


def dtype(name: str) -> str:
    """The name of an element type in PyTorch's C++, which the analyser knows.

    Args:
        name: PyTorch's name in Python, such as "float32".
    """
    return _DTYPES.get(name, name.capitalize())


_writing = threading.Lock()

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
