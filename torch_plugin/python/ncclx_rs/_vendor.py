"""The vendors' communication libraries."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass

from ncclx_rs._load import native

# The backends that they are behind.
LIBRARIES = ("nccl", "rccl")


@dataclass(frozen=True)
class VendorLibrary:
    """A library that was loaded, and what it lacks of what newer ones can do."""

    path: str
    version: str
    lacks: list[str]


def find_vendor_library(backend: str) -> VendorLibrary:
    """Loads the library behind a backend.

    It is that of the settings, else the one that PyTorch has loaded, that of a Python package, or that of the system.

    Raises:
        OSError: there is none, or it cannot be used.
    """
    path, version, lacks = native().vendor_library(backend, [sysconfig.get_path("purelib")])
    return VendorLibrary(str(path), version, lacks)


def what_is_missing(backend: str) -> str:
    """The reason why a vendor's library cannot be used."""
    try:
        library = find_vendor_library(backend)
    except OSError as error:
        return str(error)
    return (
        f"{backend.upper()} {library.version} is at {library.path}, but this version of ncclx_rs does not drive it; "
        'for tensors on CUDA devices use backend="cpu:ncclx_rs,cuda:nccl" with torch.distributed'
    )
