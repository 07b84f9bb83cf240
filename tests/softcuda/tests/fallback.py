"""Lets PyTorch compute on CUDA tensors without a GPU: see ext/fallback.cpp."""

from __future__ import annotations

import ctypes
import os

import torch


def install() -> int:
    """Runs `aten::` operators by CPU kernels from now on; how many."""
    # PyTorch registers its CUDA kernels when it first needs them: they must not come later.
    torch.cuda.init()
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
    return int(ctypes.CDLL(f"{os.environ['SOFTCUDA_HOME']}/libfallback.so").softcuda_install_fallback())
