"""Allocators of tensors in memory that other processes can map."""

from __future__ import annotations

import functools
import math
import threading
import warnings
from typing import Any

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


@functools.cache
def cuda_allocator(by_library: bool = False) -> Any:
    """The allocator of device memory that other processes can map, for `torch.cuda.MemPool`.

    There is one in a process, and one beside it for communicators of a vendor's library, which allocates there.

    Raises:
        RuntimeError: this PyTorch has no CUDA, or the machine no device.
    """
    # Its functions have no types.
    cuda: Any = torch.backends.cuda
    if native()._cuda_devices() <= 0 or not cuda.is_built():
        raise RuntimeError("get_mem_allocator: this PyTorch has no CUDA")
    path = native().__file__
    allocate = "ncclx_rs_library_malloc" if by_library else "ncclx_rs_cuda_malloc"
    own: Any = torch.cuda.memory.CUDAPluggableAllocator(path, allocate, "ncclx_rs_cuda_free")
    return own.allocator()


def allocator_of(by_library: bool, why_not: str) -> Any:
    """The allocator that the engine has chosen; a warning says why it is not the library's where that should be."""
    if why_not:
        message = f"get_mem_allocator: the memory is the engine's own, and is not registered: {why_not}"
        warnings.warn(message, UserWarning, stacklevel=2)
    return cuda_allocator(by_library)


# PyTorch lets one thread at a time allocate from a pool.
_pool_lock = threading.Lock()


@functools.cache
def _pool(allocator: Any) -> Any:
    """The pool of `empty_on_device`. It stays, as other ranks may have mapped what is in it."""
    return torch.cuda.MemPool(allocator)


def empty_on_device(
    length: int, dtype: torch.dtype, device: torch.device, by_library: bool, why_not: str
) -> torch.Tensor:
    """A tensor of ``length`` elements with anything in them, in device memory that other processes can map."""
    allocator = allocator_of(by_library, why_not)
    with _pool_lock, torch.cuda.use_mem_pool(_pool(allocator), device):
        return torch.empty(length, dtype=dtype, device=device)
