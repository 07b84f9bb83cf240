"""Checks whether torch.compile can trace the object API, for programs that ask first."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

MIN_PYTORCH_VERSION_FOR_COMPILE = "2.11.0"


def is_torch_compile_supported(
    min_version: str = MIN_PYTORCH_VERSION_FOR_COMPILE, _current_version: str | None = None
) -> bool:
    """Whether ``torch.compile(fullgraph=True)`` can trace the operations of the object API.

    Args:
        min_version: the oldest supported PyTorch.
    """
    return TorchVersion(_current_version or torch.__version__) >= min_version


def is_torch_compile_supported_and_enabled(
    min_version: str = MIN_PYTORCH_VERSION_FOR_COMPILE, _current_version: str | None = None
) -> bool:
    """As `is_torch_compile_supported`. Only torchcomms needs ``TORCHCOMMS_PATCH_FOR_COMPILE=1``; here nothing does."""
    return is_torch_compile_supported(min_version, _current_version)
