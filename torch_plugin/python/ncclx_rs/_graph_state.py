"""The registry that graphs of torch.compile refer to: communicators and windows by name, and operations in flight.

The operators are in another module: registering them takes time, so they are loaded when the first operation is traced.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from ncclx_rs._batch import BatchSendRecv
    from ncclx_rs._types import OpOptions
    from ncclx_rs._work import TorchWork


class Communicator(Protocol):
    """The methods of a communicator that operators call, besides its operations, which they find by name."""

    def get_size(self) -> int: ...

    def batch_op_create(self) -> BatchSendRecv: ...


class Window(Protocol):
    """The members of a window that operators use."""

    _comm_handle: str

    def _access(self, operation: str, options: OpOptions, *args: Any) -> TorchWork: ...

    def map_remote_tensor(self, rank: int) -> torch.Tensor: ...


_named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def handle(named: Communicator | Window, name: str) -> str:
    """Registers a communicator or window under its name, to which a number is added if the name is in use."""
    with _lock:
        names = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
        free = next(name for name in names if name not in _named)
        _named[free] = named
        return free


def find(handle: str) -> Any:
    """The communicator or window of a handle.

    Raises:
        RuntimeError: it no longer exists.
    """
    found = _named.get(handle)
    if found is None:
        raise RuntimeError(f"a compiled graph uses `{handle}`, which no longer exists")
    return found


@dataclass
class InFlight:
    """An operation that a graph started.

    Attributes:
        work: the operation's work.
        results: the tensors that it writes.
        inputs: its arguments, kept until it is done.
        comm: the handle of its communicator.
        waited: whether a wait for it has begun.
    """

    work: TorchWork
    results: list[torch.Tensor]
    inputs: tuple[Any, ...]
    comm: str
    waited: bool = False


# By the token that stands for the work in the graph.
in_flight: dict[int, InFlight] = {}


def forget(comm: str) -> int:
    """Drops a communicator's operations in flight; returns the number of those that no code has waited for."""
    tokens = [token for token, call in list(in_flight.items()) if call.comm == comm]
    return sum(not in_flight.pop(token).waited for token in tokens)
