"""Collective communication for PyTorch, in Rust.

Installed, it needs no import: ``torch.distributed.init_process_group("ncclx_rs")`` finds it by entry point.

Example::

    import torch.distributed as dist
    dist.init_process_group("ncclx_rs")
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ncclx_rs._autoload import register

# Nothing here imports torch: torch's own start-up loads this package to register the backend. Where that is switched
# off, an import after torch's does it.
if hasattr(sys.modules.get("torch.distributed"), "Backend"):
    register()

if TYPE_CHECKING:
    from ncclx_rs._native import Backend, Options

__all__ = ["Backend", "Options", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("Backend", "Options"):
        from ncclx_rs._backend import native

        return getattr(native(), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("ncclx_rs")
    raise AttributeError(f"module 'ncclx_rs' has no attribute {name!r}")
