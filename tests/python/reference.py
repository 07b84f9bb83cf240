"""The ranks' data and the expected results of collectives, computed without communication."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

# Around every boundary of an engine: no element, one, odd counts, slightly more than a page, many chunks.
SIZES = (0, 1, 3, 1023, 65537)
LARGE = 3_000_001

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
MOVABLE = (
    *INTEGERS,
    *UNSIGNED,
    *FLOATS,
    *COMPLEX,
    torch.bool,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)


def data(
    rank: int, shape: int | Sequence[int], dtype: torch.dtype = torch.float32, salt: int = 0, low: int = -8
) -> torch.Tensor:
    """Rank `rank`'s tensor: small whole numbers, so that sums are exact in every dtype and order."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    generator = torch.Generator().manual_seed(1_000_003 * (salt + 1) + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        parts = torch.randint(low, 8, (*shape, 2), generator=generator)
        return torch.view_as_complex(parts.to(torch.float32)).to(dtype)
    if not dtype.is_signed:
        low = 0
    return torch.randint(low, 8, shape, generator=generator).to(dtype)


def any_bits(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """A tensor of random bits, for operations that only copy elements."""
    generator = torch.Generator().manual_seed(7_000_003 * (salt + 1) + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


class Wrapper(torch.Tensor):
    """A tensor around another one, which has no memory of its own, as a DTensor has none."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: object, *args: object) -> None:
        raise NotImplementedError(function)

    def __repr__(self) -> str:
        return "Wrapper()"


def without_memory() -> list[torch.Tensor]:
    """Dense, contiguous tensors of the CPU whose elements lie nowhere, or not all of them do."""
    gone, part_gone, short = torch.ones(4), torch.ones(8)[4:], torch.ones(1000)
    gone.untyped_storage().resize_(0)
    part_gone.untyped_storage().resize_(0)
    short.untyped_storage().resize_(3996)
    return [Wrapper(torch.ones(4)), torch._efficientzerotensor(4), gone, part_gone, short]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, to compare NaNs and dtypes without arithmetic."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest(tensor: torch.Tensor) -> str:
    """A short name for the tensor's bytes, to compare ranks by."""
    return hashlib.sha256(bits(tensor).numpy().tobytes()).hexdigest()[:16]


def assert_same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Fails unless both tensors have the same shape, dtype and bits."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, (
        f"{what}: got {got.dtype}{tuple(got.shape)}, expected {expected.dtype}{tuple(expected.shape)}"
    )
    if torch.equal(bits(got), bits(expected)):
        return
    wrong = (bits(got) != bits(expected)).nonzero().reshape(-1)
    element = int(wrong[0]) // got.dtype.itemsize
    values = (
        "" if got.dtype.itemsize == 0 else f"got {got.reshape(-1)[element]}, expected {expected.reshape(-1)[element]}"
    )
    raise AssertionError(f"{what}: {len(wrong)} wrong bytes, the first in element {element} of {got.numel()}: {values}")


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def reduced(tensors: Sequence[torch.Tensor], op: str = "SUM") -> torch.Tensor:
    """The tensors combined by the reduce operation of that name; integer averages truncate toward zero."""
    total = functools.reduce(_COMBINE[op], tensors)
    if op != "AVG":
        return total
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return total / len(tensors)
    return torch.div(total, len(tensors), rounding_mode="trunc")


def operation(name: str) -> dist.ReduceOp:
    """The torch constant of that name."""
    return getattr(dist.ReduceOp, name)
