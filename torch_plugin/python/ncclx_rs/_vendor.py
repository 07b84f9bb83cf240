"""The vendors' communication libraries, and the backends of the object API that are named for them."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from ncclx_rs._load import native
from ncclx_rs._mistakes import warn_of_hints
from ncclx_rs._types import CommOptions

LIBRARIES = ("nccl", "rccl")

# The backends, and the library behind each. Two ranks set up what messages between them take at the first one, which is
# what torchcomms has the last one for.
BACKENDS = {"nccl": "nccl", "rccl": "rccl", "nccl-lazy": "nccl"}


@dataclass(frozen=True)
class VendorLibrary:
    """A library that was loaded, and what it lacks of what newer ones can do."""

    path: str
    version: str
    lacks: list[str]


def find_vendor_library(backend: str) -> VendorLibrary:
    """Loads the library behind a backend, or UCX.

    It is that of the settings, else the one that PyTorch has loaded, that of a Python package, or that of the system.

    Raises:
        OSError: there is none, or it cannot be used.
    """
    path, version, lacks = native().vendor_library(backend, [sysconfig.get_path("purelib")])
    return VendorLibrary(str(path), version, lacks)


def allocates(library: str | None) -> tuple[bool, str]:
    """Whether a library allocates device memory, that of the settings if none is named; else why not, if it should.

    Raises:
        RuntimeError: the library is missing, or cannot be used.
    """
    try:
        by_library, why_not = native().allocates(library, [sysconfig.get_path("purelib")])
    except OSError as error:
        raise RuntimeError(f"get_mem_allocator: {error}") from None
    return bool(by_library), str(why_not)


# ---- the backends ----

IMPLEMENTATION = "implementation"
_IMPLEMENTATIONS = ("ncclx_rs", "torch")


def is_pytorchs(library: str | None, hints: Mapping[str, str]) -> bool:
    """Whether a backend of this library is PyTorch's."""
    return library is not None and hints.get(IMPLEMENTATION) == "torch"


def check(backend: str, library: str, device: torch.device, hints: Mapping[str, str]) -> None:
    """Raises ValueError if a backend cannot serve a device with these hints, whatever this host has."""
    where = "ncclx_rs: new_comm: argument"
    if device.type != "cuda":
        raise ValueError(
            f"{where} `device`: expected a CUDA device, which alone the backend {backend} serves, got {device}; "
            f'the engine without {library.upper()} serves others, as in new_comm("ncclx", "cpu")'
        )
    implementation = hints.get(IMPLEMENTATION, "ncclx_rs")
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"{where} `hints`: expected {IMPLEMENTATION}=ncclx_rs or {IMPLEMENTATION}=torch, got {implementation!r}"
        )
    if (engine := hints.get("engine", library)) != library:
        raise ValueError(
            f"{where} `hints`: expected engine={library}, or none, with the backend {backend}, got {engine!r}; the "
            'backend "ncclx" takes any'
        )
    if implementation == "torch":
        if lacking := _lacking_in_pytorch(library):
            raise ValueError(
                f"{where} `hints`: {IMPLEMENTATION}=torch takes a PyTorch with {library.upper()}: {lacking}"
            )
        _fields(hints)


def _lacking_in_pytorch(library: str) -> str | None:
    has = "rccl" if torch.version.hip else "nccl"
    if not dist.is_nccl_available():
        return f"{torch.__version__}, which is installed, has none; install one for GPUs"
    return None if has == library else f'{torch.__version__}, which is installed, has {has.upper()}; take "{has}"'


# The hints of torchcomms that are fields of NCCL's configuration, as PyTorch has them.
_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "blocking": ("blocking", int),
    "cgaClusterSize": ("cga_cluster_size", int),
    "minCTAs": ("min_ctas", int),
    "maxCTAs": ("max_ctas", int),
    "netName": ("net_name", str),
    "splitShare": ("split_share", int),
    "trafficClass": ("traffic_class", int),
    "commName": ("comm_name", str),
    "collnetEnable": ("collnet_enable", int),
    "CTAPolicy": ("cta_policy", int),
    "nvlsCTAs": ("nvls_ctas", int),
}


def _fields(hints: Mapping[str, str]) -> dict[str, Any]:
    """The values of PyTorch's fields, by hint."""
    made = {}
    for hint in hints.keys() & _FIELDS.keys():
        _, kind = _FIELDS[hint]
        try:
            made[hint] = kind(hints[hint])
        except ValueError:
            raise ValueError(
                f"ncclx_rs: new_comm: argument `hints`: expected a whole number as {hint}, got {hints[hint]!r}"
            ) from None
    return made


# Those that mean nothing to the engine: its communicators never block, and have names of their own.
_NOT_THE_ENGINES = {"blocking", "commName"}


def engine_hints(library: str, hints: Mapping[str, str]) -> dict[str, str]:
    """The hints of the engine's communicator for a backend that is the engine."""
    fields = {name: value for name, value in hints.items() if name in _FIELDS.keys() - _NOT_THE_ENGINES}
    made = {name: value for name, value in hints.items() if name not in fields and name != IMPLEMENTATION}
    if fields:
        earlier = [made["nccl_config"]] if made.get("nccl_config") else []
        made["nccl_config"] = ",".join([*earlier, *(f"{name}={value}" for name, value in fields.items())])
    return {**made, "engine": library}


def instead(library: str) -> str:
    """What to do where ranks cannot use a library together."""
    return (
        f"either each rank's host gets a {library.upper()}, whose file the hint {library}_library may name, or "
        'new_comm("ncclx", ...) does without'
    )


_OTHER_HINTS = {IMPLEMENTATION, "engine", "timeout_seconds", "is_high_priority_stream"}


def make_process_group(device: torch.device, options: CommOptions) -> Any:
    """PyTorch's ProcessGroupNCCL, which connects at its first operations.

    Args:
        device: its CUDA device.
        options: those of the communicator, with hints that `check` has seen.
    """
    made: Any = cast(Any, dist).ProcessGroupNCCL.Options()
    made._timeout = options.timeout
    made.is_high_priority_stream = options.hints.get("is_high_priority_stream", "").lower() in ("1", "true", "yes", "y")
    made.group_name = options.name
    made.global_ranks_in_group = list(range(options.size))
    config = made.config
    for hint, value in _fields(options.hints).items():
        field, _ = _FIELDS[hint]
        if hasattr(config, field):
            setattr(config, field, value)
        else:
            warn_of_hints("new_comm", [hint], f"PyTorch {torch.__version__}")
    warn_of_hints("new_comm", options.hints.keys() - _FIELDS.keys() - _OTHER_HINTS, "PyTorch's ProcessGroupNCCL")
    group = cast(Any, dist).ProcessGroupNCCL(options.store, options.rank, options.size, made)
    index = torch.cuda.current_device() if device.index is None else device.index
    group.bound_device_id = torch.device("cuda", index)
    return group
