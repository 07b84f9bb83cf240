"""The entry point that torch calls: makes the backend's name known, and nothing more."""

from __future__ import annotations

import warnings
from typing import Any


def register() -> None:
    """Registers the backend ``ncclx_rs`` for CPU and CUDA tensors. Idempotent.

    Runs inside ``import torch``, so it loads no native code and never raises: a failure becomes a warning, and the
    error proper comes when the backend is asked for.
    """
    try:
        import torch.distributed as dist

        if not dist.is_available() or "ncclx_rs" in dist.Backend.backend_list:
            return
        dist.Backend.register_backend("ncclx_rs", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception as error:
        warnings.warn(f"ncclx_rs could not register its backend: {error}", RuntimeWarning, stacklevel=2)


def _create(options: Any, pg_options: Any = None) -> Any:
    from ncclx_rs._backend import create

    return create(options, pg_options)
