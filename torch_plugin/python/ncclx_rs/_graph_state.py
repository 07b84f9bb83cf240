"""What graphs of torch.compile refer to: communicators and windows by name, and operations in flight.

Apart from the operators, which take time to register and are loaded when the first operation is traced.
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
    """What graphs call of a communicator, beside the operations that they find by name."""

    def get_size(self) -> int: ...

    def batch_op_create(self) -> BatchSendRecv: ...


class Window(Protocol):
    """What graphs call of a window."""

    _comm_handle: str

    def _access(self, operation: str, options: OpOptions, *args: Any) -> TorchWork: ...

    def map_remote_tensor(self, rank: int) -> torch.Tensor: ...


_named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def handle(named: Communicator | Window, name: str) -> str:
    """What graphs call a communicator or window: its name, with a number where another that is in use has the same."""
    with _lock:
        names = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
        free = next(name for name in names if name not in _named)
        _named[free] = named
        return free


def find(handle: str) -> Any:
    """The communicator or window of a handle.

    Raises:
        RuntimeError: it is gone.
    """
    found = _named.get(handle)
    if found is None:
        raise RuntimeError(f"a compiled graph uses `{handle}`, which no longer exists")
    return found


@dataclass
class InFlight:
    """An operation that a graph started.

    Attributes:
        work: its work.
        results: what it writes to.
        inputs: kept until it is done.
        comm: the handle of its communicator.
        waited: whether somebody has begun to wait for it.
    """

    work: TorchWork
    results: list[torch.Tensor]
    inputs: tuple[Any, ...]
    comm: str
    waited: bool = False


# By the number that the graph has in place of the work.
in_flight: dict[int, InFlight] = {}


def forget(comm: str) -> int:
    """Drops what is in flight on a communicator, and says for how many operations nobody has waited."""
    tokens = [token for token, call in list(in_flight.items()) if call.comm == comm]
    return sum(not in_flight.pop(token).waited for token in tokens)
