"""The entry point that torch calls at its start. It only registers the backend's name."""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

from ncclx_rs import _take_over
from ncclx_rs._gpu import has_driver, has_gpu

_DEVICES = ("cpu", "cuda")


def register() -> None:
    """Registers the backend ``ncclx_rs``: for CPU tensors, and where there is a driver for CUDA tensors. Idempotent.

    It runs inside ``import torch``, so it loads no native code of ours and never raises. A failure becomes a warning;
    the error is raised when a program asks for the backend.
    """
    try:
        import torch.distributed as dist

        from ncclx_rs._alias import is_installed

        if not dist.is_available():
            return
        _register_as("ncclx_rs")
        if is_installed():
            # torchcomms' name of this engine. PyTorch's torchcomms mode takes only names that c10d knows.
            _register_as("ncclx")
        _wrap("init_process_group")
        if has_gpu():
            _check_groups()
        chosen = os.environ.get("NCCLX_RS_DEFAULT", "")
        set_default(*(device.strip() for device in chosen.split(",") if device.strip()))
        for backend in os.environ.get("NCCLX_RS_INSTEAD_OF", "").split(","):
            if backend.strip():
                take_over(backend.strip())
    except Exception as error:
        warnings.warn(f"ncclx_rs could not register its backend: {error}", RuntimeWarning, stacklevel=2)


def _register_as(name: str) -> None:
    import torch.distributed as dist

    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, _create, extended_api=True, devices=list(_served()))


def _served() -> tuple[str, ...]:
    return _DEVICES if has_driver() else ("cpu",)


def set_default(*devices: str) -> None:
    """Makes ncclx_rs PyTorch's default backend for tensors on these devices.

    PyTorch takes the default where a program names no backend. The environment variable ``NCCLX_RS_DEFAULT``, as in
    ``cpu,cuda``, has the same effect without a change of the program.

    Args:
        devices: ``cpu`` or ``cuda``; the latter also for programs that ask for CUDA on a host without a GPU. On a host
            with a GPU but no CUDA driver, CUDA tensors stay with the backend that they had, with a warning.

    Raises:
        ValueError: a name is neither ``cpu`` nor ``cuda``.
    """
    import torch.distributed as dist

    for device in devices:
        if device not in _DEVICES:
            raise ValueError(f"ncclx_rs: set_default: expected one of {', '.join(_DEVICES)}, got {device!r}")
    for device in devices:
        if device == "cuda" and has_gpu() and not has_driver():
            warnings.warn(
                "ncclx_rs: set_default: CUDA tensors are not served without a CUDA driver, and stay with "
                f"`{dist.Backend.default_device_backend_map.get(device)}`",
                RuntimeWarning,
                stacklevel=2,
            )
            continue
        dist.Backend.default_device_backend_map[device] = "ncclx_rs"
        _expected.add(device)
    if _expected:
        _check_groups()


def take_over(backend: str) -> None:
    """Makes process groups that would run on another backend run on ncclx_rs.

    The program, and PyTorch, still call these groups by the other backend's name. All ranks must do the same. The
    environment variable ``NCCLX_RS_INSTEAD_OF=gloo`` has the same effect without a change of the program.

    Args:
        backend: ``gloo``. Gloo keeps what it alone can serve, such as tensors of devices other than CPUs and CUDA's.

    Raises:
        ValueError: it is another backend.
        RuntimeError: it is too late, there are process groups already.
    """
    _register_as("ncclx_rs")
    _take_over.start(backend)


# The devices that `set_default` was called for.
_expected: set[str] = set()


_NAMES = ("ncclx_rs", "ncclx")


def _check_groups() -> None:
    """Wraps the functions that make groups, so that they check which backend serves which device."""
    for name in ("init_process_group", "new_group"):
        _wrap(name)


def _wrap(name: str) -> None:
    """Wraps a function that makes groups; see `_checked`. Idempotent."""
    import torch.distributed as dist

    original = getattr(dist, name)
    if not hasattr(original, "_ncclx_rs_checked"):
        checked = _checked(name, original)
        # pickle looks for a function in the module that defines it.
        setattr(dist, name, checked)
        setattr(dist.distributed_c10d, name, checked)


def _checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        try:
            call = parameters.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # which raises it, with a text of its own
        backend = call.arguments.get("backend")
        _explain_name(name, backend)
        if has_gpu():
            _refuse_cuda(name, backend, call.arguments.get("device_id"))
        if name == "init_process_group" and _is_ours(backend):
            from ncclx_rs._alone import init_process_group

            made = init_process_group(original, call)
        else:
            made = original(*args, **kwargs)
        group = dist.group.WORLD if name == "init_process_group" else made
        if _expected and isinstance(group, dist.ProcessGroup):
            _warn_of_other_backends(name, group)
        return made

    make._ncclx_rs_checked = True  # type: ignore[attr-defined]  # functions take any
    return make


def _explain_name(function: str, backend: Any) -> None:
    """Refuses the name that this backend has in `new_comm` alone, which PyTorch knows nothing of."""
    import torch.distributed as dist

    names = [pair.rsplit(":", 1)[-1] for pair in str(backend or "").lower().split(",")]
    if "ncclx" in names and "ncclx" not in dist.Backend.backend_list:
        raise ValueError(
            f"ncclx_rs: {function}: argument `backend`: expected ncclx_rs, got {backend}: it is ncclx in new_comm, "
            "and here only after ncclx_rs.install_as_torchcomms()"
        )


def _is_ours(backend: Any) -> bool:
    """Whether an argument ``backend`` puts tensors of some device on this backend."""
    if backend is None:
        return bool(_expected)
    pairs = str(backend).lower().split(",")
    return any(pair.rsplit(":", 1)[-1] in _NAMES for pair in pairs)


def _refuse_cuda(function: str, backend: str | None, device_id: Any) -> None:
    """Refuses groups whose CUDA tensors the engine would get and cannot serve: their operations would fail."""
    import torch

    from ncclx_rs._load import native

    names = (backend or "").lower()
    served = dict(pair.split(":", 1) for pair in names.split(",") if ":" in pair)
    bound = names in _NAMES and device_id is not None and torch.device(device_id).type == "cuda"
    if not bound and served.get("cuda") not in _NAMES:
        return
    try:
        native()._cuda_devices()
    except ValueError as error:
        raise ValueError(
            f"ncclx_rs: {function}: CUDA tensors are not served here: {str(error).removeprefix('ncclx_rs: ')}; "
            'give each device its backend, as in backend="cpu:ncclx_rs,cuda:nccl"'
        ) from None


def _warn_of_other_backends(function: str, group: Any) -> None:
    """Warns of a group for which the program names another backend than this default."""
    import torch.distributed as dist

    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    for device in sorted(_expected & backends.keys()):
        runs_here = backends[device] in _NAMES or (
            _take_over.is_taken_over(backends[device]) and _take_over.serves(device)
        )
        if not runs_here:
            warnings.warn(
                f"ncclx_rs was made the default for {device} tensors, and this group does not run on it: "
                f"{function} was asked for `{backends[device]}` by name",
                RuntimeWarning,
                stacklevel=3,
            )


def _create(options: Any, pg_options: Any = None) -> Any:
    from ncclx_rs import _pytorch_recorder
    from ncclx_rs._backend import create

    pg_options = _take_over.own_options(pg_options)
    backend = create(options, pg_options)
    _pytorch_recorder.configure(backend, pg_options)
    return backend
