"""The entry point that torch calls: makes the backend's name known, and nothing more."""

from __future__ import annotations

import functools
import glob
import os
import warnings
from collections.abc import Callable
from typing import Any

_DEVICES = ("cpu", "cuda")
# What shows that there is a GPU: NVIDIA's drivers for servers and for Jetson, Windows' for its Linux, AMD's.
_GPU_NODES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvgpu*", "/dev/dxg", "/dev/kfd")


def register() -> None:
    """Registers the backend ``ncclx_rs`` for CPU tensors and, where there is a GPU, for CUDA tensors. Idempotent.

    Runs inside ``import torch``, so it loads no native code and never raises: a failure becomes a warning, and the
    error proper comes when the backend is asked for.
    """
    try:
        import torch.distributed as dist

        from ncclx_rs import as_torchcomms

        if not dist.is_available():
            return
        _register_as("ncclx_rs")
        if as_torchcomms.is_installed():
            # What torchcomms calls this engine; its mode of PyTorch takes only names that c10d knows.
            _register_as("ncclx")
        chosen = os.environ.get("NCCLX_RS_DEFAULT", "")
        set_default(*(device.strip() for device in chosen.split(",") if device.strip()))
    except Exception as error:
        warnings.warn(f"ncclx_rs could not register its backend: {error}", RuntimeWarning, stacklevel=2)


def _register_as(name: str) -> None:
    import torch.distributed as dist

    if name not in dist.Backend.backend_list:
        dist.Backend.register_backend(name, _create, extended_api=True, devices=_devices())


def _devices() -> list[str]:
    """The devices whose tensors a group serves that names none."""
    # PyTorch 2.15's flight recorder asks CUDA about each barrier of a group that serves it. Where there is no GPU that
    # throws an exception, which takes two fifths of the barrier's time.
    has_gpu = any(glob.glob(pattern) for pattern in _GPU_NODES)
    return [device for device in _DEVICES if device == "cpu" or has_gpu]


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
        _expected.add(device)
    if _expected:
        _check_groups()


# The devices for whose tensors `set_default` has asked for this backend.
_expected: set[str] = set()


def _check_groups() -> None:
    """Has the functions that make groups warn where a program names another backend than this default."""
    import torch.distributed as dist

    for name in ("init_process_group", "new_group"):
        original = getattr(dist, name)
        if not hasattr(original, "_ncclx_rs_checked"):
            setattr(dist, name, _checked(name, original))


def _checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist

        made = original(*args, **kwargs)
        group = dist.group.WORLD if name == "init_process_group" else made
        if isinstance(group, dist.ProcessGroup):
            backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
            for device in sorted(_expected & backends.keys()):
                if backends[device] not in ("ncclx_rs", "ncclx"):
                    warnings.warn(
                        f"ncclx_rs was made the default for {device} tensors, and this group does not run on it: "
                        f"{name} was asked for `{backends[device]}` by name",
                        RuntimeWarning,
                        stacklevel=2,
                    )
        return made

    make._ncclx_rs_checked = True  # type: ignore[attr-defined]  # functions take any
    return make


def _create(options: Any, pg_options: Any = None) -> Any:
    from ncclx_rs._backend import create

    return create(options, pg_options)
