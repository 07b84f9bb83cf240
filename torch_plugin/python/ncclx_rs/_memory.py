"""Memory that the ranks of one host can read in place."""

from __future__ import annotations

import math

import torch

from ncclx_rs._load import native


class MemAllocator:
    """Makes CPU tensors in memory that the other processes of this host can map.

    The engine uses that by itself for messages of more than ``single_copy_bytes``: the receiver then needs neither a
    copy by the sender nor a system call. Each tensor is a mapping and a file descriptor of its own, so this is meant
    for few large buffers that live long, as of gradients. Forked processes share the memory
    for as long as the one that made it keeps the tensor.
    """

    def empty(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of zeros.

        Args:
            size: its shape.
            dtype: its element type; by default that of `torch.get_default_dtype`.

        Raises:
            ValueError: a dimension is negative, or no memory could be that large.
            torch.distributed.DistBackendError: the machine has less memory, or the process no file
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
