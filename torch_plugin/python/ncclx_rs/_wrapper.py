"""Communicators as c10d backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ncclx_rs._load import native

if TYPE_CHECKING:
    from ncclx_rs._comm import TorchComm


class _Kind(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, native().BackendWrapper)


class _BackendWrapper(metaclass=_Kind):
    """The c10d backend under a communicator, for a ``torch.distributed.ProcessGroup``.

    Its operations call the communicator's hooks; ``get_comm()`` is the communicator. What is made is an object of the
    native module, which this name does not load: ``torch.distributed`` imports it when it is imported itself.

    Args:
        comm: a communicator over a c10d backend.

    Raises:
        RuntimeError: the communicator's backend is not one of c10d's.
    """

    def __new__(cls, comm: TorchComm) -> Any:
        from ncclx_rs import _pytorch_recorder

        if comm.get_backend() == "ncclx":
            _pytorch_recorder.takes_pytorchs(comm.get_options().hints)
        return native().BackendWrapper(comm)
