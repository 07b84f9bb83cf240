"""Collective communication for PyTorch, in Rust.

The installed package needs no import: ``torch.distributed.init_process_group("ncclx_rs")`` finds it by entry point.

Example::

    import torch.distributed as dist
    dist.init_process_group("ncclx_rs")
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import TYPE_CHECKING, Any

from ncclx_rs._autoload import register
from ncclx_rs._autoload import set_default as set_default
from ncclx_rs._autoload import take_over as take_over

# This module does not import torch: torch loads it at its own start to register the backend. If that is switched off,
# an import of this package after torch registers it.
if hasattr(sys.modules.get("torch.distributed"), "Backend"):
    register()

if TYPE_CHECKING:
    from ncclx_rs import device_mesh as device_mesh
    from ncclx_rs import distwrap as distwrap
    from ncclx_rs import hooks as hooks
    from ncclx_rs import objcol as objcol
    from ncclx_rs._api import *  # noqa: F403
    from ncclx_rs._native import Backend as Backend
    from ncclx_rs._native import Options as Options
    from ncclx_rs.as_torchcomms import install_as_torchcomms as install_as_torchcomms


_MODULES = ("device_mesh", "distwrap", "functional", "hooks", "objcol")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("ncclx_rs")
    if name in ("Backend", "Options"):
        from ncclx_rs._load import native

        return getattr(native(), name)
    if name in _MODULES:
        return importlib.import_module(f"ncclx_rs.{name}")
    if name == "install_as_torchcomms":
        # Does not load torch: the program calls it before it imports torch.
        return importlib.import_module("ncclx_rs.as_torchcomms").install_as_torchcomms
    # The object API needs torch, so it is loaded at its first use. Names of submodules do not load it.
    if not name.startswith("_") or name in ("_BackendWrapper", "_is_backend_registered"):
        api = importlib.import_module("ncclx_rs._api")
        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module 'ncclx_rs' has no attribute {name!r}")


def __dir__() -> list[str]:
    api = importlib.import_module("ncclx_rs._api")
    return [*globals(), "Backend", "Options", "__version__", "install_as_torchcomms", *_MODULES, *api.__all__]
