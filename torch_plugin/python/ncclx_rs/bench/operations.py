"""The operations to measure: their buffers, calls, expected results and bandwidth factors.

Sizes and factors of the bus bandwidth are those of nccl-tests (its doc/PERFORMANCE.md). The size is the bytes of one
rank's tensor. For operations that join or divide ranks' blocks, it is the bytes of all blocks.

Buffers lie on the device that `torch.device` has made the default while an operation is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

ROOT = 0
# The period of the inputs, in elements: a prime, so that blocks of usual lengths differ.
_PERIOD = 13
# Fills outputs before a checked call, so that an unwritten one is found: more than the sums of nine ranks.
_POISON = 113
_COMPARED = 1 << 18


class Pending(Protocol):
    """The result of an asynchronous call: a `torch.distributed.Work`, or several of them."""

    def wait(self) -> Any:
        """Waits until the result is there."""


@dataclass(frozen=True)
class Place:
    """A rank and its world."""

    rank: int
    size: int


@dataclass(frozen=True)
class Job:
    """One operation on buffers of one size.

    Attributes:
        call: Calls it on a group, with True asynchronously. That returns the object to wait for, or None if this rank
            takes no part.
        tensors: All buffers.
        inputs: Buffers, each with its content before a checked call.
        results: Buffers, each with the content that it must have afterwards.
    """

    call: Callable[[dist.ProcessGroup, bool], Pending | None]
    tensors: Sequence[torch.Tensor]
    inputs: Callable[[], Sequence[tuple[torch.Tensor, torch.Tensor]]]
    results: Callable[[], Sequence[tuple[torch.Tensor, torch.Tensor]]]

    def fill(self) -> None:
        """Writes the inputs, and fills all other buffers with poison."""
        for tensor in self.tensors:
            tensor.fill_(_POISON)
        for tensor, content in self.inputs():
            tensor.copy_(content)

    def wrong(self, size: int) -> int:
        """The number of this rank's wrong elements; the rounding of a sum of `size` addends is allowed."""
        return sum(count_wrong(got, expected, size) for got, expected in self.results())

    def clear(self) -> None:
        """Zeroes all buffers, so that repeated sums do not overflow."""
        for tensor in self.tensors:
            tensor.zero_()


@dataclass(frozen=True)
class Operation:
    """An operation that can be measured.

    Attributes:
        build: Makes the buffers for a number of elements: of the tensor, or of one block.
        blocks: Whether the size is that of all ranks' blocks.
        bus_factor: Bus bandwidth divided by algorithm bandwidth, for a number of ranks.
        traffic: What all ranks together must read and write at least, divided by the size: each input once, each
            output once.
        least_ranks: The size of the smallest world in which it is measured.
        sized: Whether it moves data.
        trips: How many times the data travels in a synchronous call; the time of a call is divided by it.
    """

    build: Callable[[Place, int, torch.dtype], Job]
    blocks: bool
    bus_factor: Callable[[int], float]
    traffic: Callable[[int], float]
    least_ranks: int = 1
    sized: bool = True
    trips: int = 1

    def count(self, size_bytes: int, ranks: int, dtype: torch.dtype) -> int:
        """The number of elements for `build`: at least one, and such that the ranks' blocks are equal."""
        if not self.sized:
            return 0
        return max(1, size_bytes // dtype.itemsize // (ranks if self.blocks else 1))

    def bytes(self, count: int, ranks: int, dtype: torch.dtype) -> int:
        """The size of a number of elements: the inverse of `count`."""
        return count * dtype.itemsize * (ranks if self.blocks else 1)


def count_wrong(got: torch.Tensor, expected: torch.Tensor, addends: int = 1) -> int:
    """The number of elements in which `got` differs from `expected`.

    Args:
        got: A tensor of one dimension, on any device.
        expected: Another of the same length and type, on the CPU.
        addends: Floating-point results may differ by the rounding of a sum of this many addends.
    """
    wrong = 0
    # Compares in parts, so that large tensors need little additional memory.
    for start in range(0, got.numel(), _COMPARED):
        part, should_be = got[start : start + _COMPARED].cpu(), expected[start : start + _COMPARED]
        if part.is_floating_point():
            same = torch.isclose(part, should_be, rtol=addends * torch.finfo(part.dtype).eps, atol=0.0)
        else:
            same = part == should_be
        wrong += int(part.numel() - same.sum())
    return wrong


def pattern(rank: int, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements `start` to `start + count` of a rank's data."""
    return _periodic(_period(rank, start), count, dtype)


def total(ranks: int, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The same elements of the sum of all ranks' data."""
    return _periodic(torch.stack([_period(rank, start) for rank in range(ranks)]).sum(dim=0), count, dtype)


def _period(rank: int, start: int) -> torch.Tensor:
    return (torch.arange(_PERIOD) + start + 3 * rank) % _PERIOD


def _periodic(period: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    return period.to(dtype).repeat(-(-count // _PERIOD))[:count]


# ---- the operations ----


def _all_reduce(at: Place, count: int, dtype: torch.dtype) -> Job:
    data = torch.empty(count, dtype=dtype)
    return Job(
        lambda group, later: dist.all_reduce(data, group=group, async_op=later),
        [data],
        lambda: [(data, pattern(at.rank, 0, count, dtype))],
        lambda: [(data, total(at.size, 0, count, dtype))],
    )


def _reduce(at: Place, count: int, dtype: torch.dtype) -> Job:
    data = torch.empty(count, dtype=dtype)
    return Job(
        lambda group, later: dist.reduce(data, ROOT, group=group, async_op=later),
        [data],
        lambda: [(data, pattern(at.rank, 0, count, dtype))],
        # The backend may change the other ranks' tensors.
        lambda: [(data, total(at.size, 0, count, dtype))] if at.rank == ROOT else [],
    )


def _broadcast(at: Place, count: int, dtype: torch.dtype) -> Job:
    data = torch.empty(count, dtype=dtype)
    return Job(
        lambda group, later: dist.broadcast(data, ROOT, group=group, async_op=later),
        [data],
        lambda: [(data, pattern(ROOT, 0, count, dtype))] if at.rank == ROOT else [],
        lambda: [(data, pattern(ROOT, 0, count, dtype))],
    )


def _gathering(at: Place, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's block, and a buffer for all blocks."""
    return torch.empty(count, dtype=dtype), torch.empty(at.size * count, dtype=dtype)


def _gathered(at: Place, block: torch.Tensor, everything: torch.Tensor, call: Any, present: bool = True) -> Job:
    count, dtype = block.numel(), block.dtype
    return Job(
        call,
        [block, everything],
        lambda: [(block, pattern(at.rank, 0, count, dtype))],
        lambda: (
            [(part, pattern(rank, 0, count, dtype)) for rank, part in enumerate(everything.chunk(at.size))]
            if present
            else []
        ),
    )


def _all_gather(at: Place, count: int, dtype: torch.dtype) -> Job:
    block, everything = _gathering(at, count, dtype)
    parts = list(everything.chunk(at.size))
    return _gathered(
        at, block, everything, lambda group, later: dist.all_gather(parts, block, group=group, async_op=later)
    )


def _all_gather_into_tensor(at: Place, count: int, dtype: torch.dtype) -> Job:
    block, everything = _gathering(at, count, dtype)
    return _gathered(
        at,
        block,
        everything,
        lambda group, later: dist.all_gather_into_tensor(everything, block, group=group, async_op=later),
    )


def _gather(at: Place, count: int, dtype: torch.dtype) -> Job:
    block, everything = _gathering(at, count, dtype)
    parts = list(everything.chunk(at.size)) if at.rank == ROOT else None
    return _gathered(
        at,
        block,
        everything,
        lambda group, later: dist.gather(block, parts, ROOT, group=group, async_op=later),
        present=at.rank == ROOT,
    )


def _scatter(at: Place, count: int, dtype: torch.dtype) -> Job:
    block, everything = _gathering(at, count, dtype)
    parts = list(everything.chunk(at.size)) if at.rank == ROOT else None
    return Job(
        lambda group, later: dist.scatter(block, parts, ROOT, group=group, async_op=later),
        [block, everything],
        lambda: [(everything, pattern(ROOT, 0, at.size * count, dtype))],
        lambda: [(block, pattern(ROOT, at.rank * count, count, dtype))],
    )


def _reduce_scattered(at: Place, block: torch.Tensor, everything: torch.Tensor, call: Any) -> Job:
    count, dtype = block.numel(), block.dtype
    return Job(
        call,
        [block, everything],
        lambda: [(everything, pattern(at.rank, 0, at.size * count, dtype))],
        lambda: [(block, total(at.size, at.rank * count, count, dtype))],
    )


def _reduce_scatter(at: Place, count: int, dtype: torch.dtype) -> Job:
    block, everything = _gathering(at, count, dtype)
    parts = list(everything.chunk(at.size))
    return _reduce_scattered(
        at, block, everything, lambda group, later: dist.reduce_scatter(block, parts, group=group, async_op=later)
    )


def _reduce_scatter_tensor(at: Place, count: int, dtype: torch.dtype) -> Job:
    block, everything = _gathering(at, count, dtype)
    return _reduce_scattered(
        at,
        block,
        everything,
        lambda group, later: dist.reduce_scatter_tensor(block, everything, group=group, async_op=later),
    )


def _exchanged(at: Place, count: int, dtype: torch.dtype, make_call: Any) -> Job:
    sent, received = (torch.empty(at.size * count, dtype=dtype) for _ in range(2))
    return Job(
        make_call(sent, received),
        [sent, received],
        lambda: [(sent, pattern(at.rank, 0, at.size * count, dtype))],
        lambda: [
            (part, pattern(rank, at.rank * count, count, dtype)) for rank, part in enumerate(received.chunk(at.size))
        ],
    )


def _all_to_all(at: Place, count: int, dtype: torch.dtype) -> Job:
    def make(sent: torch.Tensor, received: torch.Tensor) -> Any:
        inputs, outputs = list(sent.chunk(at.size)), list(received.chunk(at.size))
        return lambda group, later: dist.all_to_all(outputs, inputs, group=group, async_op=later)

    return _exchanged(at, count, dtype, make)


def _all_to_all_single(at: Place, count: int, dtype: torch.dtype) -> Job:
    def make(sent: torch.Tensor, received: torch.Tensor) -> Any:
        return lambda group, later: dist.all_to_all_single(received, sent, group=group, async_op=later)

    return _exchanged(at, count, dtype, make)


class _Both:
    """Two works as one."""

    def __init__(self, first: Any, second: Any) -> None:
        self._works = (first, second)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _send_recv(at: Place, count: int, dtype: torch.dtype) -> Job:
    """Messages of each even rank and the next one: ping-pong, or both directions at once if asynchronous."""
    sent, received = (torch.empty(count, dtype=dtype) for _ in range(2))
    peer = at.rank ^ 1
    alone = peer >= at.size

    def call(group: dist.ProcessGroup, later: bool) -> Pending | None:
        if alone:
            return None
        if later:
            return _Both(dist.irecv(received, peer, group=group), dist.isend(sent, peer, group=group))
        if at.rank < peer:
            dist.send(sent, peer, group=group)
            dist.recv(received, peer, group=group)
        else:
            dist.recv(received, peer, group=group)
            dist.send(sent, peer, group=group)
        return None

    return Job(
        call,
        [sent, received],
        lambda: [(sent, pattern(at.rank, 0, count, dtype))],
        lambda: [] if alone else [(received, pattern(peer, 0, count, dtype))],
    )


def _barrier(at: Place, count: int, dtype: torch.dtype) -> Job:
    return Job(lambda group, later: dist.barrier(group=group, async_op=later), [], lambda: [], lambda: [])


def _once(ranks: int) -> float:
    return 1.0


def _shared(ranks: int) -> float:
    return (ranks - 1) / ranks


def _twice(ranks: int) -> float:
    return 2.0 * ranks


def _all_and_one(ranks: int) -> float:
    return ranks + 1.0


OPERATIONS = {
    "all_reduce": Operation(_all_reduce, False, bus_factor=lambda ranks: 2 * (ranks - 1) / ranks, traffic=_twice),
    "reduce": Operation(_reduce, False, bus_factor=_once, traffic=_all_and_one),
    "broadcast": Operation(_broadcast, False, bus_factor=_once, traffic=lambda ranks: float(ranks)),
    "all_gather": Operation(_all_gather, True, bus_factor=_shared, traffic=_all_and_one),
    "all_gather_into_tensor": Operation(_all_gather_into_tensor, True, bus_factor=_shared, traffic=_all_and_one),
    "reduce_scatter": Operation(_reduce_scatter, True, bus_factor=_shared, traffic=_all_and_one),
    "reduce_scatter_tensor": Operation(_reduce_scatter_tensor, True, bus_factor=_shared, traffic=_all_and_one),
    "all_to_all": Operation(_all_to_all, True, bus_factor=_shared, traffic=_twice),
    "all_to_all_single": Operation(_all_to_all_single, True, bus_factor=_shared, traffic=_twice),
    "gather": Operation(_gather, True, bus_factor=_shared, traffic=lambda ranks: 2.0),
    "scatter": Operation(_scatter, True, bus_factor=_shared, traffic=lambda ranks: 2.0),
    # Each pair of ranks sends a message one way at a time.
    "send_recv": Operation(
        _send_recv, False, bus_factor=_once, traffic=lambda ranks: 2.0 * (ranks // 2), least_ranks=2, trips=2
    ),
    "barrier": Operation(_barrier, False, bus_factor=_once, traffic=lambda ranks: 0.0, sized=False),
}
