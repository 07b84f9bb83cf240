"""`new_comm`, which makes communicators."""

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
    """Makes a communicator of all ranks. All ranks call it; it returns once all have joined.

    Args:
        backend: the backend's name. The first of these that has the name is taken: a class given to
            `register_backend`; the library
            that ``NCCLX_RS_BACKEND_LIB_PATH_<NAME>`` names; ``ncclx``, the engine of this package; an entry point of
            the group ``ncclx_rs.backends``, then ``torchcomms.backends``; ``gloo`` or another backend of the installed
            PyTorch; the library that ``TORCHCOMMS_BACKEND_LIB_PATH_<NAME>`` names.
        device: the device of the tensors: the CPU, or a CUDA device; ``cuda`` is the current one.
        name: the communicator's name in messages, the same on every rank. The default is ``comm`` with a number.
        abort_process_on_timeout_or_error: whether the process ends when an operation times out or a rank is lost;
            otherwise the operation raises, and so does every later one. The default is the value of
            ``TORCHCOMM_ABORT_ON_ERROR``, else true.
        timeout: the timeout of joining, and of operations without one of their own. The default is the value of the
            hint ``timeout_seconds``, of ``NCCLX_RS_TIMEOUT_SECONDS`` or of ``TORCHCOMM_TIMEOUT_SECONDS``, else 600 s.
        is_high_priority_stream: whether CUDA operations run on a high-priority stream.
        store: the store for the bootstrap. The default is a TCP store at ``MASTER_ADDR`` and ``MASTER_PORT``.
        enable_reconfigure: whether `TorchComm.reconfigure` may change the members.
        hints: settings by name. An unknown name causes a warning.
        rank: this process's rank. The default comes from the launcher's environment, as for ``size``.
        size: the number of ranks.

    Raises:
        ModuleNotFoundError: there is no such backend.
        ImportError: its shared library cannot be used.
        ValueError: the backend does not serve the device, or a hint has no valid value.
        RuntimeError: rank, size or the store's address are not known, or ranks did not join in time.
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
        pass  # `reconfigure` gets the members' addresses from their handles
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
    given = (text for text in (hints.get("timeout_seconds"), *variables) if text)
    return timedelta(seconds=float(next(given, "600")))


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
