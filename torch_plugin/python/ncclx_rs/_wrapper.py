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
    """A communicator as a c10d backend, for a ``torch.distributed.ProcessGroup``.

    Its operations call the communicator's hooks; ``get_comm()`` returns the communicator. A call makes an object of the
    native module. Importing this name does not load that module: ``torch.distributed`` imports it at its own import.

    It serves the members that the communicator has now. After a `TorchComm.reconfigure` its operations raise
    RuntimeError, and a process group of the new members needs another wrapper.

    Args:
        comm: a communicator over a c10d backend.
        owns: whether the communicator ends with the process group. Otherwise it stays usable until it is finalized.

    Raises:
        RuntimeError: the communicator's backend is no c10d backend, or it was not reconfigured yet.
    """

    def __new__(cls, comm: TorchComm, owns: bool = True) -> Any:
        from ncclx_rs import _pytorch_recorder

        if comm.get_backend() == "ncclx":
            _pytorch_recorder.uses_pytorchs(comm.get_options().hints)
        return native().BackendWrapper(comm, owns)
