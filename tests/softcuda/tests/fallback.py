"""Lets PyTorch compute on CUDA tensors without a GPU: see ext/fallback.cpp."""

from __future__ import annotations

import ctypes
import os

import torch


def install() -> int:
    """Runs `aten::` operators by CPU kernels from now on; how many. None on a GPU, which has its own."""
    if "SOFTCUDA_HOME" not in os.environ:
        return 0
    # PyTorch registers its CUDA kernels when it first needs them: they must not come later.
    torch.cuda.init()
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch._C._set_cudnn_enabled(False)  # the attribute is read-only in tests of PyTorch's own
    return int(ctypes.CDLL(f"{os.environ['SOFTCUDA_HOME']}/libfallback.so").softcuda_install_fallback())


def install_in_ranks() -> None:
    """The same in the processes of a launcher, when they import PyTorch: it looks for this by ../site.

    Without a compiler flex_attention refuses to run, unless it is told that this is meant.
    """
    if "RANK" in os.environ:
        from torch.nn.attention import flex_attention

        install()
        flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
