"""Collectives of Python objects.

``torch.save`` serializes the objects. With ``weights_only=True``, the default, a rank accepts only tensors, plain
containers and plain values from other ranks. Other objects need ``weights_only=False``, which unpickles and so runs
code that the sender chose: use it only among ranks that trust each other. An object that is not accepted raises
``pickle.UnpicklingError``.

With ``TORCHCOMMS_SERIALIZATION=pickle`` in the environment, ``pickle`` serializes the objects, and a rank unpickles
whatever comes, also with ``weights_only=True``: here, too, the ranks must trust each other.

To receive objects takes numpy.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from ncclx_rs._comm import TorchComm


def all_gather_object(
    comm: TorchComm,
    object_list: list[Any],
    obj: object,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Gives every rank each rank's object.

    Args:
        comm: the communicator.
        object_list: a list with one place for each rank, which is filled.
        obj: this rank's object.
        timeout: the timeout of each operation.
        weights_only: whether to accept only tensors and plain values; not with ``TORCHCOMMS_SERIALIZATION=pickle``.

    Raises:
        ValueError: ``object_list`` has not one place for each rank.
    """
    _check_length("all_gather_object", "object_list", object_list, comm.get_size())
    mine = _to_bytes(obj, comm)
    sizes = _sizes(comm, mine, timeout)
    everything = [torch.empty(size, dtype=torch.uint8, device=comm.get_device()) for size in sizes]
    comm.all_gather_v(everything, mine, False, timeout=timeout)
    object_list[:] = [_to_object(part, weights_only) for part in everything]


def gather_object(
    comm: TorchComm,
    obj: object,
    root: int,
    object_gather_list: list[Any] | None = None,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Gives the root each rank's object.

    Args:
        comm: the communicator.
        obj: this rank's object.
        root: the rank that gets the objects.
        object_gather_list: on the root, a list with one place for each rank, which is filled.
        timeout: the timeout of each operation.
        weights_only: whether to accept only tensors and plain values; not with ``TORCHCOMMS_SERIALIZATION=pickle``.

    Raises:
        ValueError: on the root, ``object_gather_list`` is missing or has not one place for each rank.
    """
    if comm.get_rank() == root:
        if object_gather_list is None:
            raise ValueError("gather_object: argument `object_gather_list`: expected a list on the root, got None")
        _check_length("gather_object", "object_gather_list", object_gather_list, comm.get_size())
    mine = _to_bytes(obj, comm)
    sizes = _sizes(comm, mine, timeout)
    # All blocks of a gather have one size.
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=comm.get_device())
    padded[: mine.numel()] = mine
    everything = [torch.empty_like(padded) for _ in sizes] if comm.get_rank() == root else []
    comm.gather(everything, padded, root, False, timeout=timeout)
    if object_gather_list is not None and comm.get_rank() == root:
        parts = (part[:size] for part, size in zip(everything, sizes, strict=True))
        object_gather_list[:] = [_to_object(part, weights_only) for part in parts]


def send_object_list(
    comm: TorchComm,
    object_list: Sequence[Any],
    dst: int,
    timeout: timedelta | None = None,
) -> None:
    """Sends a list of objects to a rank, which must receive as many.

    Args:
        comm: the communicator.
        object_list: the objects.
        dst: the receiving rank.
        timeout: the timeout of each operation.
    """
    sizes, body = _packed(object_list, comm)
    comm.send(sizes, dst, False, timeout=timeout)
    comm.send(body, dst, False, timeout=timeout)


def recv_object_list(
    comm: TorchComm,
    object_list: list[Any],
    src: int,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Receives a list of objects from a rank.

    Args:
        comm: the communicator.
        object_list: a list as long as the sent one, which is filled.
        src: the sending rank.
        timeout: the timeout of each operation.
        weights_only: whether to accept only tensors and plain values; not with ``TORCHCOMMS_SERIALIZATION=pickle``.
    """
    sizes = torch.empty(len(object_list), dtype=torch.long, device=comm.get_device())
    comm.recv(sizes, src, False, timeout=timeout)
    body = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=comm.get_device())
    comm.recv(body, src, False, timeout=timeout)
    object_list[:] = _unpacked(sizes, body, weights_only)


def broadcast_object_list(
    comm: TorchComm,
    object_list: list[Any],
    root: int,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Gives every rank the root's objects.

    Args:
        comm: the communicator.
        object_list: on the root, the objects; elsewhere a list of the same length, which is filled.
        root: the rank that has the objects.
        timeout: the timeout of each operation.
        weights_only: whether to accept only tensors and plain values; not with ``TORCHCOMMS_SERIALIZATION=pickle``.
    """
    is_root = comm.get_rank() == root
    sizes = torch.empty(len(object_list), dtype=torch.long, device=comm.get_device())
    body = torch.empty(0, dtype=torch.uint8, device=comm.get_device())
    if is_root:
        sizes, body = _packed(object_list, comm)
    comm.broadcast(sizes, root, False, timeout=timeout)
    if not is_root:
        body = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=comm.get_device())
    comm.broadcast(body, root, False, timeout=timeout)
    if not is_root:
        object_list[:] = _unpacked(sizes, body, weights_only)


def scatter_object_list(
    comm: TorchComm,
    root: int,
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> None:
    """Gives rank r the r-th of the root's objects.

    Args:
        comm: the communicator.
        root: the rank that has the objects.
        scatter_object_output_list: a list of at least one element; the first is replaced by this rank's object.
        scatter_object_input_list: on the root, one object for each rank.
        timeout: the timeout of each operation.
        weights_only: whether to accept only tensors and plain values; not with ``TORCHCOMMS_SERIALIZATION=pickle``.

    Raises:
        ValueError: ``scatter_object_output_list`` is empty, or the root's list is missing or has not one object for
            each rank.
    """
    if not scatter_object_output_list:
        raise ValueError("scatter_object_list: argument `scatter_object_output_list`: expected a place, got none")
    device, size = comm.get_device(), comm.get_size()
    sizes = torch.zeros(size, dtype=torch.long, device=device)
    parts: list[torch.Tensor] = []
    if comm.get_rank() == root:
        if scatter_object_input_list is None:
            raise ValueError("scatter_object_list: argument `scatter_object_input_list`: expected a list on the root")
        _check_length("scatter_object_list", "scatter_object_input_list", scatter_object_input_list, size)
        parts = [_to_bytes(obj, comm) for obj in scatter_object_input_list]
        sizes = torch.tensor([part.numel() for part in parts], device=device)
    comm.broadcast(sizes, root, False, timeout=timeout)
    # All blocks of a scatter have one size.
    longest = int(sizes.max())
    padded = [torch.nn.functional.pad(part, (0, longest - part.numel())) for part in parts]
    mine = torch.empty(longest, dtype=torch.uint8, device=device)
    comm.scatter(mine, padded, root, False, timeout=timeout)
    scatter_object_output_list[0] = _to_object(mine[: int(sizes[comm.get_rank()])], weights_only)


# ---- objects and bytes ----


def _uses_pickle() -> bool:
    return os.environ.get("TORCHCOMMS_SERIALIZATION") == "pickle"


def _to_bytes(obj: object, comm: TorchComm) -> torch.Tensor:
    stream = io.BytesIO()
    if _uses_pickle():
        pickle.dump(obj, stream)
    else:
        torch.save(obj, stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8).to(comm.get_device())


def _to_object(part: torch.Tensor, weights_only: bool) -> Any:
    stream = io.BytesIO(part.cpu().numpy().tobytes())
    if _uses_pickle():
        return pickle.load(stream)
    return torch.load(stream, weights_only=weights_only)


def _packed(objects: Sequence[Any], comm: TorchComm) -> tuple[torch.Tensor, torch.Tensor]:
    """The objects' sizes, and their bytes in one tensor."""
    parts = [_to_bytes(obj, comm) for obj in objects]
    sizes = torch.tensor([part.numel() for part in parts], dtype=torch.long, device=comm.get_device())
    return sizes, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=comm.get_device())


def _unpacked(sizes: torch.Tensor, body: torch.Tensor, weights_only: bool) -> list[Any]:
    return [_to_object(part, weights_only) for part in torch.split(body, sizes.tolist())]


def _sizes(comm: TorchComm, mine: torch.Tensor, timeout: timedelta | None) -> list[int]:
    """The number of bytes of each rank."""
    own = torch.tensor([mine.numel()], dtype=torch.long, device=comm.get_device())
    sizes = torch.empty(comm.get_size(), dtype=torch.long, device=comm.get_device())
    comm.all_gather_single(sizes, own, False, timeout=timeout)
    return [int(size) for size in sizes]


def _check_length(operation: str, argument: str, objects: Sequence[Any], size: int) -> None:
    if len(objects) != size:
        raise ValueError(f"{operation}: argument `{argument}`: expected a list of {size}, got {len(objects)}")
