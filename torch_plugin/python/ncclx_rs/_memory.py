"""The allocator of tensors in shared memory."""

from __future__ import annotations

import math

import torch

from ncclx_rs._load import native


class MemAllocator:
    """Makes CPU tensors in shared memory, which the other processes of this host can map.

    For messages of more than ``single_copy_bytes`` the receiver reads such a tensor in place: the sender copies
    nothing, and there is no system call. Each tensor takes a mapping and a file descriptor, so this is meant for few
    large buffers that live long, such as those of gradients. Forked processes share the memory for as long as the
    process that made the tensor keeps it.
    """

    def empty(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of zeros.

        Args:
            size: the shape.
            dtype: the element type. The default is `torch.get_default_dtype`'s.

        Raises:
            ValueError: a dimension is negative, or the tensor would have 2**63 bytes or more.
            torch.distributed.DistBackendError: the machine has not enough memory, or the process has no file
                descriptor left.
        """
        if any(length < 0 for length in size):
            raise ValueError(f"MemAllocator.empty: argument `size`: expected lengths of at least 0, got {size}")
        dtype = dtype or torch.get_default_dtype()
        length = math.prod(size) * dtype.itemsize
        if length >= 1 << 63:
            raise ValueError(f"MemAllocator.empty: argument `size`: expected less than 2**63 bytes, got {length}")
        memory: torch.Tensor = native()._shared_memory(length)
        return memory.view(dtype).view(size)
