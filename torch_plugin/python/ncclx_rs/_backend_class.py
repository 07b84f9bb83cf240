"""The base class of backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ncclx_rs._types import CommOptions


class TorchCommBackend:
    """The base class of backends. A communicator calls its methods after it has checked the arguments.

    A backend in Python derives from this class. `register_backend`, or an entry point in the group
    ``ncclx_rs.backends``, gives it a name. It defines ``init``, ``finalize``, ``get_rank``, ``get_size``,
    ``get_backend_name`` and its operations, which have the names of `TorchComm`'s. An operation returns a work (any
    object with ``wait()``), or None if it is done. A method with a parameter ``options`` gets the call's timeout and
    hints. A backend may also define ``abort``, ``set_timeout``, ``split``, ``reconfigure`` and ``on_failure``; see
    docs/backends.md.
    """

    # By the names of operations, what runs a blocking one on plain tensors with less ado, and returns whether it did.
    _direct: Mapping[str, Callable[..., bool]] = MappingProxyType({})

    def init(self, device: torch.device, name: str, options: CommOptions) -> None:
        """Joins the communicator."""
        raise NotImplementedError

    def finalize(self) -> None:
        """Leaves the communicator."""

    def has_failed(self) -> bool:
        """Whether an operation has timed out or a rank was lost. It may be true before ``on_failure``'s hook runs."""
        return False

    def wait_for_hooks(self) -> None:
        """Waits for a limited time until the hook of ``on_failure`` has run; returns at once if called by that hook."""

    def get_rank(self) -> int:
        raise NotImplementedError

    def get_size(self) -> int:
        raise NotImplementedError

    def get_backend_name(self) -> str:
        return type(self).__name__

    def get_backend_version(self) -> str:
        return "unknown"

    def get_mem_allocator(self) -> Any:
        """The allocator of tensors that the backend communicates fastest."""
        raise RuntimeError(f"get_mem_allocator: the backend {self.get_backend_name()} has no memory allocator")
