"""Loads the native module at its first use."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import re
import sys
from typing import Any


def native() -> Any:
    """The native module.

    Raises:
        ImportError: it was built against another minor version of torch, or cannot be loaded.
    """
    # The native classes derive from classes of torch.distributed.
    import torch
    import torch.distributed

    if "ncclx_rs._native" not in sys.modules:
        _check_built(torch.__version__)
    # Waits if another thread is loading it.
    return importlib.import_module("ncclx_rs._native")


def _check_built(running: str) -> None:
    spec = importlib.util.find_spec("ncclx_rs._native")
    if spec is None or spec.origin is None:
        raise ImportError(
            "ncclx_rs has no native module; type `pip install --no-build-isolation .` in its source folder"
        )
    built = _built_version(spec.origin)
    if built is not None and built.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(
            f"ncclx_rs was built against torch {built}, and this is torch {running}; "
            "type `pip install --no-build-isolation --force-reinstall --no-deps .` in its source folder"
        )


def _built_version(path: str) -> str | None:
    """The version of torch that the module was built against, read from its file: loading it could crash."""
    found = re.search(rb"NCCLX_RS_TORCH_VERSION=([0-9][^;]*);", pathlib.Path(path).read_bytes())
    return found.group(1).decode() if found else None
