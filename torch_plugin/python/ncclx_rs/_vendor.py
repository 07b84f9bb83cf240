"""The search for the vendors' communication libraries."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

# For each backend, its library and the folder of the Python package that contains it.
LIBRARIES = {"nccl": ("libnccl.so.2", "nvidia/nccl/lib"), "rccl": ("librccl.so.1", "_rocm_sdk_libraries/lib")}


def _folders(package: str) -> list[Path]:
    searched = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    system = (
        "/usr/lib",
        "/usr/lib64",
        f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}",
        "/usr/local/lib",
        "/opt/rocm/lib",
    )
    return [Path(sysconfig.get_path("purelib")) / package, *map(Path, filter(None, searched)), *map(Path, system)]


def what_is_missing(backend: str) -> str:
    """The reason why a vendor's library cannot be used: the folders without it, or the folder that has it."""
    library, package = LIBRARIES[backend]
    folders = _folders(package)
    for folder in folders:
        if (folder / library).exists():
            return f"{library} is at {folder}, but this version of ncclx_rs does not drive it"
    return f"{library} was not found in {', '.join(map(str, folders))}"
