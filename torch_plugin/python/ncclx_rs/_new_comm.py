"""Makes communicators."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch._C import _distributed_c10d as c10d

from ncclx_rs import _bootstrap
from ncclx_rs._backends import C10dBackend, make_backend
from ncclx_rs._comm import TorchComm
from ncclx_rs._library import LibraryBackend
from ncclx_rs._operations import Hints
from ncclx_rs._types import CommOptions


def new_comm(
    backend: str,
    device: torch.device | str,
    name: str | None = None,
    abort_process_on_timeout_or_error: bool | None = None,
    timeout: timedelta | None = None,
    is_high_priority_stream: bool | None = None,
    store: c10d.Store | None = None,
    enable_reconfigure: bool = False,
    hints: Hints = None,
    *,
    rank: int | None = None,
    size: int | None = None,
) -> TorchComm:
    """Makes a communicator of all ranks. Called on all of them; returns when all have come.

    Args:
        backend: the backend's name. The first that has it counts: a class given to `register_backend`; the library
            that ``NCCLX_RS_BACKEND_LIB_PATH_<NAME>`` names; ``ncclx``, the engine of this package; an entry point of
            the group ``ncclx_rs.backends``, then ``torchcomms.backends``; ``gloo`` or another backend of the installed
            PyTorch; the library that ``TORCHCOMMS_BACKEND_LIB_PATH_<NAME>`` names.
        device: where the tensors are; ``ncclx`` takes the CPU alone.
        name: the name, in messages; the same on every rank. Made up if not given.
        abort_process_on_timeout_or_error: whether the process ends when an operation times out or a rank is lost;
            otherwise the operation raises, and so does every later one. The default is true, or what
            ``TORCHCOMM_ABORT_ON_ERROR`` says.
        timeout: the time limit of joining and of operations that have none of their own. The default is 600 s, or what
            the hint ``timeout_seconds``, ``NCCLX_RS_TIMEOUT_SECONDS`` or ``TORCHCOMM_TIMEOUT_SECONDS`` says.
        is_high_priority_stream: whether CUDA operations run on a stream of high priority.
        store: where the ranks meet. The default is a TCP store at ``MASTER_ADDR`` and ``MASTER_PORT``.
        enable_reconfigure: whether the members may change later.
        hints: settings by name; unknown ones are warned about.
        rank: this process's rank. The default is what the launcher's environment says, as for ``size``.
        size: the number of ranks.

    Raises:
        ModuleNotFoundError: there is no such backend.
        ImportError: its shared library cannot be used.
        ValueError: the backend does not serve the device, or a hint has no valid value.
        RuntimeError: rank, size or the meeting place are not known, or ranks did not come in time.
    """
    impl = make_backend(backend)
    device = torch.device(device)
    if isinstance(impl, C10dBackend):
        impl.check_device(device)
    if enable_reconfigure and not hasattr(impl, "reconfigure"):
        raise RuntimeError(f"new_comm: the backend {backend} does not support enable_reconfigure")
    options = CommOptions()
    options.name = f"comm{next(_unnamed)}" if name is None else name
    options.abort_process_on_timeout_or_error = (
        _flag("TORCHCOMM_ABORT_ON_ERROR", True)
        if abort_process_on_timeout_or_error is None
        else abort_process_on_timeout_or_error
    )
    options.enable_reconfigure = enable_reconfigure
    options.hints = dict(hints or {})
    options.timeout = timeout or _default_timeout(options.hints)
    if is_high_priority_stream is not None:
        options.hints.setdefault("is_high_priority_stream", str(is_high_priority_stream).lower())
    if enable_reconfigure:
        pass  # members come by `reconfigure`, from whatever places their handles name
    elif isinstance(impl, C10dBackend | LibraryBackend) or rank is not None or size is not None:
        if rank is None or size is None:
            rank, size = (0, 1) if backend == "fake" else _bootstrap.rank_and_size()
        options.rank, options.size = rank, size
        options.store = _bootstrap.store_for(options.name, store, rank, size, options.timeout)
    else:
        options.store = store
    impl.init(device, options.name, options)
    return TorchComm(impl, options.name, device, options)


def _default_timeout(hints: Mapping[str, str]) -> timedelta:
    variables = (os.environ.get(f"{owner}_TIMEOUT_SECONDS") for owner in ("NCCLX_RS", "TORCHCOMM"))
    told = (text for text in (hints.get("timeout_seconds"), *variables) if text)
    return timedelta(seconds=float(next(told, "600")))


def _flag(variable: str, default: bool) -> bool:
    text = os.environ.get(variable)
    if text is None:
        return default
    if text.lower() in ("1", "true", "yes", "y"):
        return True
    if text.lower() in ("0", "false", "no", "n"):
        return False
    raise RuntimeError(f"new_comm: {variable} must be true or false, got {text!r}")


_unnamed = itertools.count()
