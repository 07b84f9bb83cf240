"""Makes the c10d backend of a process group."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import Any

from ncclx_rs._load import native
from ncclx_rs._once import once


def create(options: Any, pg_options: Any = None) -> Any:
    """The backend object of a new process group.

    Args:
        options: torch's ``DistributedBackendOptions``: store, rank, size, timeout.
        pg_options: ``ncclx_rs.Options`` with a timeout and hints for this group alone; not changed.

    Raises:
        ImportError: the native module does not load; see `native`.
        ValueError: a setting, variable or option is not valid.
        torch.distributed.DistBackendError: ranks did not join in time.
        torch.distributed.DistNetworkError: the store or a rank cannot be reached.
    """
    module = native()
    if _loads_data():
        # Beside the process that trains, for which the cores are.
        os.environ.setdefault("NCCLX_RS_THREADS", "0")
    _serve_views()
    if pg_options is not None and not isinstance(pg_options, module.Options):
        raise ValueError(
            "ncclx_rs: init_process_group: argument `pg_options`: expected ncclx_rs.Options, "
            f"got {type(pg_options).__name__}"
        )
    if pg_options is None or not pg_options.hints.get("dump_directory"):
        _warn_of_no_dumps()
    if pg_options is not None:
        _warn_of_two_limits(options.timeout, pg_options._timeout)
    backend = module.create_backend(options, pg_options)
    if getattr(options, "enable_reconfigure", False):
        # Imported only where it is needed: it imports all of torch.distributed.
        from ncclx_rs._reconfigure import Endpoint

        endpoint = Endpoint()
        backend._set_rendezvous(endpoint.handle, endpoint.rendezvous)
    _prepare_process()
    return backend


def _loads_data() -> bool:
    """Whether this process is a worker of a ``DataLoader``."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def _warn_of_two_limits(argument: timedelta, option: timedelta) -> None:
    from torch.distributed.constants import default_pg_timeout

    from ncclx_rs._logging import warn

    if default_pg_timeout not in (argument, option) and argument != option:
        warn(f"the argument `timeout`, {argument}, wins over the timeout in `pg_options`, {option}")


@once
def _warn_of_no_dumps() -> None:
    from ncclx_rs._logging import warn

    if os.environ.get("NCCLX_RS_DUMP_SIGNAL") and not os.environ.get("NCCLX_RS_DUMP_DIRECTORY"):
        warn("NCCLX_RS_DUMP_SIGNAL: the signal will write no flight recorder: NCCLX_RS_DUMP_DIRECTORY is not set")


@once
def _serve_views() -> None:
    from ncclx_rs import _live, _metrics

    _live.start()
    _metrics.start()


@once
def _prepare_process() -> None:
    from ncclx_rs import _debug_server

    # Runs before the interpreter finalizes, while callbacks can still run.
    atexit.register(native()._end_all)
    _debug_server.register()
