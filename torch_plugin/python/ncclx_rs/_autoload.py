"""The entry point that torch calls: makes the backend's name known, and nothing more."""

from __future__ import annotations

import os
import warnings
from typing import Any

_DEVICES = ("cpu", "cuda")


def register() -> None:
    """Registers the backend ``ncclx_rs`` for CPU and CUDA tensors. Idempotent.

    Runs inside ``import torch``, so it loads no native code and never raises: a failure becomes a warning, and the
    error proper comes when the backend is asked for.
    """
    try:
        import torch.distributed as dist

        if not dist.is_available() or "ncclx_rs" in dist.Backend.backend_list:
            return
        dist.Backend.register_backend("ncclx_rs", _create, extended_api=True, devices=list(_DEVICES))
        chosen = os.environ.get("NCCLX_RS_DEFAULT", "")
        set_default(*(device.strip() for device in chosen.split(",") if device.strip()))
    except Exception as error:
        warnings.warn(f"ncclx_rs could not register its backend: {error}", RuntimeWarning, stacklevel=2)


def set_default(*devices: str) -> None:
    """Makes ncclx_rs what PyTorch takes for tensors on these devices where a program names no backend.

    The environment variable ``NCCLX_RS_DEFAULT``, as in ``cpu,cuda``, does so for programs that are not to be changed.

    Args:
        devices: ``cpu`` or ``cuda``.

    Raises:
        ValueError: another device.
    """
    import torch.distributed as dist

    for device in devices:
        if device not in _DEVICES:
            raise ValueError(f"ncclx_rs: set_default: expected one of {', '.join(_DEVICES)}, got {device!r}")
    for device in devices:
        dist.Backend.default_device_backend_map[device] = "ncclx_rs"


def _create(options: Any, pg_options: Any = None) -> Any:
    from ncclx_rs._backend import create

    return create(options, pg_options)
