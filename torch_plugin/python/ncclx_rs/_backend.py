"""Makes a c10d backend of the native module, which is loaded at the first use."""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import pathlib
import re
import sys
from datetime import timedelta
from typing import Any

from ncclx_rs._once import once


def native() -> Any:
    """The native module.

    Raises:
        ImportError: it was built against another minor version of torch, or cannot be loaded.
    """
    # The native classes derive from those of torch.distributed.
    import torch
    import torch.distributed

    if "ncclx_rs._native" not in sys.modules:
        _check_built(torch.__version__)
    # Waits for a thread that loads it.
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
    """The torch that the module in ``path`` was built against, read without loading it, which could crash."""
    found = re.search(rb"NCCLX_RS_TORCH_VERSION=([0-9][^;]*);", pathlib.Path(path).read_bytes())
    return found.group(1).decode() if found else None


def create(options: Any, pg_options: Any = None) -> Any:
    """The backend object of a new process group.

    Args:
        options: torch's ``DistributedBackendOptions``: store, rank, size, timeout.
        pg_options: ``ncclx_rs.Options``, for a time limit and hints of this group alone; not changed.

    Raises:
        ImportError: see `native`.
        ValueError: a setting or option is not valid.
        torch.distributed.DistNetworkError: ranks did not come or cannot be reached.
    """
    module = native()
    if pg_options is not None and not isinstance(pg_options, module.Options):
        raise ValueError(
            "ncclx_rs: init_process_group: argument `pg_options`: expected ncclx_rs.Options, "
            f"got {type(pg_options).__name__}"
        )
    if pg_options is not None:
        _warn_of_two_limits(options.timeout, pg_options._timeout)
    backend = module.create_backend(options, pg_options)
    if getattr(options, "enable_reconfigure", False):
        # Not before it is needed: it needs all of torch.distributed.
        from ncclx_rs._reconfigure import Endpoint

        endpoint = Endpoint()
        backend._members_meet(endpoint.handle, endpoint.meet)
    _prepare_process()
    return backend


def _warn_of_two_limits(argument: timedelta, option: timedelta) -> None:
    from torch.distributed.constants import default_pg_timeout

    from ncclx_rs._logging import warn

    if default_pg_timeout not in (argument, option) and argument != option:
        warn(f"the argument `timeout`, {argument}, wins over the timeout in `pg_options`, {option}")


@once
def _prepare_process() -> None:
    from ncclx_rs import _debug_server

    # Before the interpreter goes, while callbacks can still run.
    atexit.register(native()._end_all)
    _debug_server.register()
