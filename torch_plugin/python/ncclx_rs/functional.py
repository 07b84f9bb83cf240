"""What torch.compile can do with the object API: for now nothing, and programs that ask are told so."""

from __future__ import annotations


def is_torch_compile_supported() -> bool:
    """Whether ``torch.compile(fullgraph=True)`` can trace operations of the object API."""
    return False


def is_torch_compile_supported_and_enabled() -> bool:
    """Whether it can, and ``TORCHCOMMS_PATCH_FOR_COMPILE`` asks for it."""
    return False
