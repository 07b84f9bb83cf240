"""The memory of flight recorders: a ring of operations, and what a dump says of them."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

VERSION = "2.10"

# Shape and type of tensors.
Shapes = list[tuple[list[int], str]]


@dataclass(eq=False)
class Group:
    """A communicator that is watched.

    Attributes:
        number: tells it from others of its name.
        comm_name: its name.
        backend: its backend's name.
        timeout_ms: its time limit.
        members: its ranks as the communicator that all were split from numbers them.
        collectives: how many collectives began.
        completed: the last one that is done; -1 if none is.
        messages: how many messages began, by sender and receiver.
    """

    number: int
    comm_name: str
    backend: str
    timeout_ms: int
    members: list[int]
    collectives: int = 0
    completed: int = -1
    messages: collections.Counter[tuple[int, int]] = field(default_factory=collections.Counter)


@dataclass(eq=False)
class Entry:
    """One operation, or one message of a batch.

    Attributes:
        record: its number in the recorder.
        group: its communicator.
        op_id: the operation's number in the process.
        name: what it is.
        route: a message's sender and receiver.
        sequence: the how-manieth collective of the communicator it is, or message of this route.
        inputs: what it reads: shape and type of each tensor.
        outputs: what it writes.
    """

    record: int
    group: Group
    op_id: int
    name: str
    route: tuple[int, int] | None
    sequence: int
    inputs: Shapes
    outputs: Shapes
    created: int = field(default_factory=time.time_ns)
    began: int = field(default_factory=time.perf_counter_ns)
    duration: int | None = None
    thread: tuple[int, str] = field(default_factory=lambda: _this_thread())

    @property
    def section(self) -> tuple[str, list[int]]:
        """Name and ranks of what the analyser compares it in.

        That is the communicator for a collective. The analyser takes the entries of a section by number and wants each
        from every rank. So messages, which concern two ranks and arrive in order, are a section for each direction
        between two ranks.
        """
        if self.route is None:
            return self.group.comm_name, self.group.members
        sender, receiver = self.route
        return f"{self.group.comm_name} {sender}->{receiver}", sorted({sender, receiver})

    def as_dict(self) -> dict[str, Any]:
        """What a dump says of it."""
        section, ranks = self.section
        done = self.duration is not None
        name = f"{self.group.backend}:{self.name}"
        if self.route is not None:  # "send 0->1" or "recv 1<-0", by position among the section's ranks
            sender, receiver = (ranks.index(rank) for rank in self.route)
            name += f" {sender}->{receiver}" if self.name == "send" else f" {receiver}<-{sender}"
        return {
            "record_id": self.record,
            "pg_id": self.group.number,
            "process_group": [section, self.group.backend],
            "collective_seq_id": self.sequence,
            "p2p_seq_id": 0 if self.route is None else self.sequence,
            "op_id": self.op_id,
            "profiling_name": name,
            "time_created_ns": self.created,
            **({"duration_ms": self.duration / 1e6} if self.duration is not None else {}),
            "input_sizes": [shape for shape, _ in self.inputs],
            "input_dtypes": [dtype for _, dtype in self.inputs],
            "output_sizes": [shape for shape, _ in self.outputs],
            "output_dtypes": [dtype for _, dtype in self.outputs],
            "state": "completed" if done else "started",
            "time_discovered_started_ns": self.created,
            "time_discovered_completed_ns": None if self.duration is None else self.created + self.duration,
            "retired": done,
            "timeout_ms": self.group.timeout_ms,
            "is_p2p": self.route is not None,
            "thread_id": str(self.thread[0]),
            "thread_name": self.thread[1],
        }


class Recorder:
    """The last operations of some communicators. Its memory does not grow with their number."""

    def __init__(self, max_entries: int) -> None:
        self._lock = threading.Lock()
        self._entries: collections.deque[Entry] = collections.deque(maxlen=max_entries)
        self._groups: dict[int, Group] = {}
        self._numbers = itertools.count()
        self._records = itertools.count()

    @property
    def max_entries(self) -> int:
        """How many operations are remembered."""
        return self._entries.maxlen or 0

    def grow(self, max_entries: int) -> None:
        """Remembers at least so many operations from now on."""
        with self._lock:
            if max_entries > self.max_entries:
                self._entries = collections.deque(self._entries, maxlen=max_entries)

    def add_group(self, comm_name: str, backend: str, timeout_ms: int, members: list[int]) -> Group:
        """Starts watching a communicator."""
        with self._lock:
            group = Group(next(self._numbers), comm_name, backend, timeout_ms, members)
            self._groups[group.number] = group
            return group

    def drop_group(self, group: Group) -> None:
        """Stops watching a communicator. Its entries stay, and so does what dumps say of it while there are some."""
        with self._lock:
            self._groups.pop(group.number, None)

    def began(
        self,
        group: Group,
        op_id: int,
        name: str,
        inputs: Shapes,
        outputs: Shapes,
        route: tuple[int, int] | None = None,
    ) -> Entry:
        """Remembers an operation, or one message of a batch."""
        with self._lock:
            if route is None:
                group.collectives += 1
                sequence = group.collectives
            else:
                group.messages[route] += 1
                sequence = group.messages[route]
            entry = Entry(next(self._records), group, op_id, name, route, sequence, inputs, outputs)
            self._entries.append(entry)
            return entry

    def ended(self, entry: Entry) -> None:
        """Notes that an operation is done."""
        with self._lock:
            entry.duration = time.perf_counter_ns() - entry.began
            if entry.route is None:
                entry.group.completed = max(entry.group.completed, entry.sequence)

    def withdrawn(self, entry: Entry) -> None:
        """Forgets the last operation of a group, which other ranks do not see."""
        with self._lock:
            if entry.route is None:
                entry.group.collectives -= 1
            else:
                entry.group.messages[entry.route] -= 1
            if entry in self._entries:
                self._entries.remove(entry)

    def reset(self) -> None:
        """Forgets every operation."""
        with self._lock:
            self._entries.clear()
            self._records = itertools.count()

    def size(self) -> int:
        """How many operations are remembered."""
        return len(self._entries)

    def dump(self, include_completed: bool) -> dict[str, Any]:
        """Everything, in the words of PyTorch's recorder."""
        with self._lock:
            entries = [entry for entry in self._entries if include_completed or entry.duration is None]
            groups = self._groups | {entry.group.number: entry.group for entry in entries}
            sections = [(group.comm_name, group.members, group) for group in groups.values()]
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
                        "last_started_collective": str(group.collectives or -1),
                        "last_completed_collective": str(group.completed),
                    }
                    for group in groups.values()
                },
                "entries": [entry.as_dict() for entry in entries],
            }


def shapes(tensors: Iterable[torch.Tensor]) -> Shapes:
    """What is remembered of tensors."""
    return [(list(tensor.shape), _dtype(tensor.dtype)) for tensor in tensors]


def stacked(tensors: Sequence[torch.Tensor]) -> Shapes:
    """What is remembered of tensors of one shape as if they were one."""
    return [([len(tensors), *shape], dtype) for shape, dtype in shapes(tensors[:1])]


def _this_thread() -> tuple[int, str]:
    thread = threading.current_thread()
    return thread.ident or 0, thread.name


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
