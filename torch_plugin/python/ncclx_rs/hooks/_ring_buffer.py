"""The ring buffer of flight recorders."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ncclx_rs import _trace
from ncclx_rs._trace import Group, Shapes


@dataclass(eq=False)
class Entry(_trace.Entry):
    """An operation that the calling thread begins now.

    Attributes:
        began: the time of the call by a monotonic clock.
    """

    thread: tuple[int, str] | None = field(default_factory=lambda: _this_thread())
    began: int = field(default_factory=time.perf_counter_ns)


class RingBuffer:
    """The last operations of several communicators, in bounded memory."""

    def __init__(self, max_entries: int) -> None:
        self._lock = threading.Lock()
        self._entries: collections.deque[Entry] = collections.deque(maxlen=max_entries)
        self._groups: dict[int, Group] = {}
        self._numbers = itertools.count()
        self._records = itertools.count()

    @property
    def max_entries(self) -> int:
        """How many operations it can hold."""
        return self._entries.maxlen or 0

    def grow(self, max_entries: int) -> None:
        """Makes room for at least that many operations."""
        with self._lock:
            if max_entries > self.max_entries:
                self._entries = collections.deque(self._entries, maxlen=max_entries)

    def add_group(self, comm_name: str, backend: str, timeout_ms: int, members: list[int]) -> Group:
        """Adds a communicator."""
        with self._lock:
            group = Group(next(self._numbers), comm_name, backend, timeout_ms, members)
            self._groups[group.number] = group
            return group

    def drop_group(self, group: Group) -> None:
        """Drops a communicator. Its entries stay, and dumps describe it as long as there are any."""
        with self._lock:
            self._groups.pop(group.number, None)

    def begin(
        self,
        group: Group,
        op_id: int,
        name: str,
        inputs: Shapes,
        outputs: Shapes,
        route: tuple[int, int] | None = None,
    ) -> Entry:
        """Records the call of an operation, or of one message of a batch."""
        with self._lock:
            if route is None:
                group.collectives += 1
                group.started = sequence = group.collectives
            else:
                group.messages[route] += 1
                sequence = group.messages[route]
            now, record = time.time_ns(), next(self._records)
            entry = Entry(record, group, op_id, name, route, sequence, inputs, outputs, created=now, started=now)
            self._entries.append(entry)
            return entry

    def complete(self, entry: Entry) -> None:
        """Records that an operation is done."""
        with self._lock:
            entry.ended = entry.created + time.perf_counter_ns() - entry.began
            entry.state = "completed"
            if entry.route is None:
                entry.group.completed = max(entry.group.completed, entry.sequence)

    def discard(self, entry: Entry) -> None:
        """Removes the last operation of a group, which other ranks do not see."""
        with self._lock:
            if entry.route is None:
                entry.group.collectives -= 1
                entry.group.started = entry.group.collectives
            else:
                entry.group.messages[entry.route] -= 1
            if entry in self._entries:
                self._entries.remove(entry)

    def reset(self) -> None:
        """Removes every operation."""
        with self._lock:
            self._entries.clear()
            self._records = itertools.count()

    def size(self) -> int:
        """How many operations it holds."""
        return len(self._entries)

    def dump(self, include_completed: bool) -> dict[str, Any]:
        """The content in the format of PyTorch's recorder."""
        with self._lock:
            entries = [entry for entry in self._entries if include_completed or entry.ended is None]
            return _trace.trace(self._groups.values(), entries)


def shapes(tensors: Iterable[torch.Tensor]) -> Shapes:
    """The recorded properties of tensors."""
    return [(list(tensor.shape), _trace.dtype(str(tensor.dtype).removeprefix("torch."))) for tensor in tensors]


def stacked(tensors: Sequence[torch.Tensor]) -> Shapes:
    """The recorded properties of tensors of one shape, as if they were one tensor."""
    return [([len(tensors), *shape], dtype) for shape, dtype in shapes(tensors[:1])]


def _this_thread() -> tuple[int, str]:
    thread = threading.current_thread()
    return thread.ident or 0, thread.name
