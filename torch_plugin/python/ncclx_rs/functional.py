"""Whether torch.compile can trace the object API, for programs that ask before they do."""

from __future__ import annotations

import torch
from torch.torch_version import TorchVersion

MIN_PYTORCH_VERSION_FOR_COMPILE = "2.11.0"


def is_torch_compile_supported(
    min_version: str = MIN_PYTORCH_VERSION_FOR_COMPILE, _current_version: str | None = None
) -> bool:
    """Whether ``torch.compile(fullgraph=True)`` can trace the operations of the object API.

    Args:
        min_version: the oldest PyTorch that will do.
    """
    return TorchVersion(_current_version or torch.__version__) >= min_version


def is_torch_compile_supported_and_enabled(
    min_version: str = MIN_PYTORCH_VERSION_FOR_COMPILE, _current_version: str | None = None
) -> bool:
    """The same: nothing has to be enabled. torchcomms wants ``TORCHCOMMS_PATCH_FOR_COMPILE=1`` in the environment."""
    return is_torch_compile_supported(min_version, _current_version)
