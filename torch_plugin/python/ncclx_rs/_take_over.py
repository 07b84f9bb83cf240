"""Process groups that a program makes of gloo, by its name or by PyTorch's default, run on this backend instead.

PyTorch makes every group in one function of ``torch.distributed.distributed_c10d``. `start` wraps it: the group is
made of this backend, and PyTorch's records then say what the program has asked for. So a program that knows the name
gloo alone finds it again, and works. There is no public interface for that.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from ncclx_rs._gpu import has_driver
from ncclx_rs._load import native
from ncclx_rs._once import once

# The backends that can be taken over.
_BACKENDS = ("gloo",)
_HELPER = "_new_process_group_helper"
_log = logging.getLogger("ncclx_rs.groups")

# Whether the group being made is one that the program has asked of another backend.
_replacing: contextvars.ContextVar[bool] = contextvars.ContextVar("ncclx_rs_replacing", default=False)


def start(backend: str) -> None:
    """Makes later groups of ``backend`` run on ncclx_rs.

    Raises:
        ValueError: it is no backend that can be taken over.
        RuntimeError: it is too late, there are process groups already.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"ncclx_rs: take_over: argument `backend`: expected {' or '.join(_BACKENDS)}, got {backend!r}")
    if is_taken_over(backend):
        return
    import torch.distributed as dist

    if groups := len(dist.distributed_c10d._world.pg_map):
        there_are = "is 1 process group" if groups == 1 else f"are {groups} process groups"
        raise RuntimeError(
            f"ncclx_rs: take_over: called too late, there {there_are} already; call it before init_process_group, "
            f"or set NCCLX_RS_INSTEAD_OF={backend} in the environment"
        )
    make = getattr(dist.distributed_c10d, _HELPER)
    setattr(dist.distributed_c10d, _HELPER, _making_ours(make))


def is_taken_over(backend: str) -> bool:
    """Whether groups of this backend run on ncclx_rs."""
    import torch.distributed as dist

    return backend in _BACKENDS and hasattr(getattr(dist.distributed_c10d, _HELPER), "_ncclx_rs_takes_over")


def own_options(pg_options: Any) -> Any:
    """The options of a group that is being made. Those of another backend are for that backend, as gloo's are."""
    return pg_options if not _replacing.get() or isinstance(pg_options, native().Options) else None


def _making_ours(make: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(make)

    @functools.wraps(make)
    def make_ours(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        asked = str(call.arguments["backend"])
        ours = _replaced(asked)
        if ours is None:
            return make(*args, **kwargs)
        call.arguments["backend"] = ours
        token = _replacing.set(True)
        try:
            made = make(*call.args, **call.kwargs)
        finally:
            _replacing.reset(token)
        _record(made[0], asked, ours)
        return made

    make_ours._ncclx_rs_takes_over = True  # type: ignore[attr-defined]  # functions take any
    return make_ours


def _replaced(asked: str) -> str | None:
    """What to ask PyTorch for instead of ``asked``; None if the group has nothing of gloo."""
    import torch.distributed as dist

    names = {pair.split(":")[-1] for pair in asked.lower().split(",")}
    if not names & {*_BACKENDS, dist.Backend.UNDEFINED}:
        return None
    backends = dist.distributed_c10d.BackendConfig(dist.Backend(asked)).get_device_backend_map()
    if not set(_BACKENDS) & set(backends.values()):
        return None
    ours = {
        device: "ncclx_rs" if backend in _BACKENDS and serves(device) else str(backend)
        for device, backend in backends.items()
    }
    types = dist.Backend.backend_type_map
    plugins = {b for b in ours.values() if types.get(b, dist.ProcessGroup.BackendType.CUSTOM) == types["ncclx_rs"]}
    if plugins != {"ncclx_rs"}:
        # PyTorch tells backends of a group apart by type: one of these two would serve the other's device, too.
        _log.info("a group of %s stays on gloo, which PyTorch can combine with %s", asked, plugins - {"ncclx_rs"})
        return None
    # A single name, where it will do: before PyTorch 2.14, groups of pairs have no default backend.
    if ":" not in asked and set(ours.values()) == {"ncclx_rs"}:
        return "ncclx_rs"
    return ",".join(f"{device}:{backend}" for device, backend in ours.items())


@functools.cache
def serves(device: str) -> bool:
    """Whether ncclx_rs takes over tensors of this device: where CUDA has no driver, there are none to serve."""
    if device == "cuda" and has_driver():
        try:
            native()._cuda_devices()
        except ValueError as error:
            _log.info("gloo keeps CUDA tensors: %s", error)
            return False
    return device in ("cpu", "cuda")


def _record(group: Any, asked: str, ours: str) -> None:
    """Makes PyTorch's records of a new group say what the program has asked for."""
    import torch.distributed as dist

    world = dist.distributed_c10d._world
    # Another group is one that was made before, or of which this rank is no member.
    if group not in world.pg_map or str(world.pg_map[group][0]) != ours:
        return
    world.pg_map[group] = (dist.Backend(asked), world.pg_map[group][1])
    world.pg_backend_config[group] = str(dist.distributed_c10d.BackendConfig(dist.Backend(asked)))
    _announce()


@once
def _announce() -> None:
    _log.info("groups that the program makes of gloo run on ncclx_rs")
