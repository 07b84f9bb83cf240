"""What a communicator calls: the base class of backends."""

from __future__ import annotations

from typing import Any

import torch

from ncclx_rs._types import CommOptions


class TorchCommBackend:
    """The base of backends: what a communicator calls once it has checked the arguments.

    A backend in Python derives from this class and is made known by `register_backend` or by an entry point in the
    group ``ncclx_rs.backends``. It defines ``init``, ``finalize``, ``get_rank``, ``get_size``, ``get_backend_name`` and
    the operations that it has, named as those of `TorchComm`; they return a work (anything with ``wait()``) or None
    when the operation is done. A method that takes ``options`` is given the call's timeout and hints. It may define
    ``abort``, ``set_timeout``, ``split``, ``reconfigure`` and ``on_failure`` too; docs/backends.md says what they do.
    """

    def init(self, device: torch.device, name: str, options: CommOptions) -> None:
        """Joins the communicator."""
        raise NotImplementedError

    def finalize(self) -> None:
        """Leaves it."""

    def has_failed(self) -> bool:
        """Whether an operation has timed out or a rank was lost, where this is known before ``on_failure`` tells."""
        return False

    def wait_for_hooks(self) -> None:
        """Waits a while for what ``on_failure`` is about to tell, except when called by that."""

    def get_rank(self) -> int:
        raise NotImplementedError

    def get_size(self) -> int:
        raise NotImplementedError

    def get_backend_name(self) -> str:
        return type(self).__name__

    def get_backend_version(self) -> str:
        return "unknown"

    def get_mem_allocator(self) -> Any:
        """What makes tensors that the backend communicates best."""
        raise RuntimeError(f"get_mem_allocator: the backend {self.get_backend_name()} has no memory allocator")
