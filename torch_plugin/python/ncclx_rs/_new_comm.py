"""`new_comm`, which makes communicators."""

from __future__ import annotations

import copy
from datetime import timedelta

import torch
from torch._C import _distributed_c10d as c10d

from ncclx_rs import _bootstrap
from ncclx_rs._backends import C10dBackend, make_backend
from ncclx_rs._comm import TorchComm
from ncclx_rs._library import LibraryBackend
from ncclx_rs._operations import Hints
from ncclx_rs._types import CommOptions, as_hints, as_timeout, default_timeout


def new_comm(
    backend: str,
    device: torch.device | str,
    name: str | None = None,
    abort_process_on_timeout_or_error: bool | None = None,
    timeout: timedelta | float | None = None,
    is_high_priority_stream: bool | None = None,
    store: c10d.Store | None = None,
    enable_reconfigure: bool | None = None,
    hints: Hints = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    options: CommOptions | None = None,
) -> TorchComm:
    """Makes a communicator of all ranks. All ranks call it; it returns once all have joined.

    Args:
        backend: the backend's name. The first of these that has the name is taken: a class given to
            `register_backend`; the library
            that ``NCCLX_RS_BACKEND_LIB_PATH_<NAME>`` names; ``ncclx``, the engine of this package; an entry point of
            the group ``ncclx_rs.backends``, then ``torchcomms.backends``; ``gloo`` or another backend of the installed
            PyTorch; the library that ``TORCHCOMMS_BACKEND_LIB_PATH_<NAME>`` names; ``nccl``, ``nccl-lazy`` and
            ``rccl``, the engine with the vendor's library, or with the hint ``implementation=torch`` PyTorch's
            ProcessGroupNCCL.
        device: the device of the tensors: the CPU, or a CUDA device; ``cuda`` is the current one.
        name: the communicator's name in messages, the same on every rank. The default is ``comm`` with a number.
            Communicators of one name in one store have the same ranks.
        abort_process_on_timeout_or_error: whether the process ends when an operation times out or a rank is lost;
            otherwise the operation raises, and so does every later one. The default is the value of
            ``TORCHCOMM_ABORT_ON_ERROR``, else true.
        timeout: the timeout of operations without one of their own. The default is the value of the hint
            ``timeout_seconds``, of ``NCCLX_RS_TIMEOUT_SECONDS`` or of ``TORCHCOMM_TIMEOUT_SECONDS``, else 600 s; zero
            stands for it. It limits joining too, which the engine gives up after ``connect_timeout_seconds``, 300 s,
            however long the timeout is.
        is_high_priority_stream: whether CUDA operations run on a high-priority stream.
        store: the store for the bootstrap. The default is a TCP store at ``MASTER_ADDR`` and ``MASTER_PORT``.
        enable_reconfigure: whether `TorchComm.reconfigure` may change the members.
        hints: settings by name. An unknown name causes a warning.
        rank: this process's rank. The default comes from the launcher's environment; without a launcher, the process is
            the only rank.
        size: the number of ranks. The default comes from there, too, also if ``rank`` is given.
        options: the arguments from ``name`` to ``hints`` in one object, which is not changed; those given win.

    Raises:
        TypeError: an argument has the wrong type.
        ModuleNotFoundError: there is no such backend.
        ImportError: its shared library cannot be used.
        ValueError: the backend does not serve the device, the timeout is negative, or a hint or a variable
            ``NCCLX_RS_<NAME>`` of a setting has no valid value.
        RuntimeError: rank, size or the store's address are not known, ranks did not join in time, or
            ``NCCLX_RS_TIMEOUT_SECONDS``, ``TORCHCOMM_TIMEOUT_SECONDS``, ``TORCHCOMM_ABORT_ON_ERROR`` or a launcher's
            variable has no valid value.
    """
    # Not on top: PyTorch may be imported only in part then.
    from ncclx_rs._torchcomms_operators import install

    install()
    impl = make_backend(backend)
    device = torch.device(device)
    if options is not None and not isinstance(options, CommOptions):
        raise TypeError(f"new_comm: argument `options`: expected CommOptions, got {type(options).__name__}")
    own = as_hints("new_comm", hints)
    if options is None:
        made = CommOptions(hints=own, abort_process_on_timeout_or_error=abort_process_on_timeout_or_error)
    else:
        made = copy.copy(options)
    made.hints = {**as_hints("new_comm", made.hints), **own}
    if isinstance(impl, C10dBackend):
        impl.check(device, made.hints)
    if abort_process_on_timeout_or_error is not None:
        made.abort_process_on_timeout_or_error = abort_process_on_timeout_or_error
    limit = as_timeout("new_comm", timeout) or as_timeout("new_comm", made.timeout)
    made.timeout = limit or default_timeout(made.hints)
    if enable_reconfigure is not None:
        made.enable_reconfigure = enable_reconfigure
    if made.enable_reconfigure and not hasattr(impl, "reconfigure"):
        raise RuntimeError(f"new_comm: the backend {backend} does not support enable_reconfigure")
    if is_high_priority_stream is not None:
        made.hints.setdefault("is_high_priority_stream", str(is_high_priority_stream).lower())
    place: tuple[int, int] | None = None
    # `reconfigure` gets the members' addresses from their handles, and a Python backend meets as it likes
    by_store = isinstance(impl, C10dBackend | LibraryBackend) or rank is not None or size is not None
    if by_store and not made.enable_reconfigure:
        if rank is None or size is None:
            launched = (0, 1) if backend == "fake" else _bootstrap.rank_and_size()
            rank, size = launched[0] if rank is None else rank, launched[1] if size is None else size
        place = (rank, size)
        made.rank, made.size = place
    with _bootstrap.meeting(name or made.name, made.store if store is None else store, place, made.timeout) as met:
        made.name, made.store = met
        impl.init(device, made.name, made)
    return TorchComm(impl, made.name, device, made)
