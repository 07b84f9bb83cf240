"""Whether this host has a GPU and a driver for it, found out without loading native code of ours."""

from __future__ import annotations

import ctypes
import functools
import glob

# Device files of GPUs: those of NVIDIA's drivers for servers and for Jetson, of WSL, and of AMD's driver.
_GPU_NODES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvgpu*", "/dev/dxg", "/dev/kfd")


@functools.cache
def has_driver() -> bool:
    """Whether there is a driver for this build of PyTorch: of CUDA, or the HIP that a PyTorch for ROCm has loaded.

    It is only loaded: not every program will use it.
    """
    import torch

    if torch.version.cuda is not None:
        files = ["libcuda.so.1"]
    elif torch.version.hip is not None:
        files = ["libamdhip64.so.7", "libamdhip64.so"]
    else:
        return False
    return any(map(_is_loadable, files))


def _is_loadable(file: str) -> bool:
    try:
        ctypes.CDLL(file)
    except OSError:
        return False
    return True


def has_gpu() -> bool:
    """Whether the system has a GPU's device file."""
    return any(glob.glob(pattern) for pattern in _GPU_NODES)
