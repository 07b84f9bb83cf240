"""Element types, reduce operations and tensor layouts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import World
from reference import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    MOVABLE,
    UNSIGNED,
    any_bits,
    assert_same,
    data,
    digest,
    operation,
    reduced,
)

COUNT = 1023
# More elements than fit into one message, for any type.
LONG = 600_001
ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")


def factors(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Operands whose product over few ranks is exact in every dtype."""
    signs = data(rank, count, torch.int64, salt=5)
    return (2 ** (signs.abs() % 2) * torch.where(signs < 0, -1 if dtype.is_signed else 1, 1)).to(dtype)


def every_dtype_moves_bit_for_bit(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in MOVABLE:
        mine = any_bits(rank, COUNT, dtype)
        copied = mine.clone()
        dist.broadcast(copied, src=size - 1)
        assert_same(copied, any_bits(size - 1, COUNT, dtype), f"broadcast of {dtype}")
        gathered = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(gathered, mine)
        flat = torch.empty(size * COUNT, dtype=dtype)
        dist.all_gather_into_tensor(flat, mine)
        for r in range(size):
            assert_same(gathered[r], any_bits(r, COUNT, dtype), f"all_gather of {dtype}, slot {r}")
            assert_same(flat[r * COUNT :][:COUNT], any_bits(r, COUNT, dtype), f"all_gather_into_tensor of {dtype}")
        exchanged = torch.empty(size * COUNT, dtype=dtype)
        dist.all_to_all_single(exchanged, any_bits(rank, size * COUNT, dtype))
        for r in range(size):
            part = any_bits(r, size * COUNT, dtype)[rank * COUNT :][:COUNT]
            assert_same(exchanged[r * COUNT :][:COUNT], part, f"all_to_all_single of {dtype} from {r}")
        if size > 1:
            received = torch.empty_like(mine)
            work = dist.isend(mine, dst=after)
            dist.recv(received, src=before)
            work.wait()
            assert_same(received, any_bits(before, COUNT, dtype), f"send of {dtype}")


def _check_reduction(rank: int, size: int, dtype: torch.dtype, op: str) -> str:
    make = factors if op == "PRODUCT" else data
    operands = [make(r, COUNT, dtype) for r in range(size)]
    result = operands[rank].clone()
    dist.all_reduce(result, op=operation(op))
    if op == "AVG" and (dtype.is_floating_point or dtype.is_complex):
        wide = reduced([o.to(torch.complex128 if dtype.is_complex else torch.float64) for o in operands], op)
        torch.testing.assert_close(result, wide.to(dtype), msg=lambda text: f"AVG of {dtype}: {text}")
    else:
        assert_same(result, reduced(operands, op), f"{op} of {dtype}")
    part = torch.empty(COUNT // size, dtype=dtype)
    dist.reduce_scatter_tensor(part, operands[rank][: COUNT // size * size].clone(), op=operation(op))
    mine = result[rank * len(part) :][: len(part)]
    if op == "AVG":
        torch.testing.assert_close(part, mine, msg=lambda text: f"reduce_scatter_tensor AVG of {dtype}: {text}")
    else:
        assert_same(part, mine, f"reduce_scatter_tensor {op} of {dtype}")
    return digest(result)


def reductions(rank: int, size: int, dtypes: tuple[torch.dtype, ...], ops: tuple[str, ...]) -> list[str]:
    return [_check_reduction(rank, size, dtype, op) for dtype in dtypes for op in ops]


def parts(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, or the parts of its complex numbers, in double precision."""
    return (torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor).double()


def rounding_is_the_same_on_every_rank(rank: int, size: int) -> list[str]:
    digests = []
    for dtype in (*FLOATS, *COMPLEX, torch.complex32):
        # The largest error of rounding a number of size one, and the precision in which averages are summed.
        unit = torch.finfo(dtype).eps / 2
        sums = min(unit, torch.finfo(torch.float32).eps / 2)
        for count in (1, 1023, 65537, LONG):
            numbers = 2 * count if dtype.is_complex else count
            operands = []
            for r in range(size):
                generator = torch.Generator().manual_seed(r)
                drawn = torch.randn(numbers, generator=generator, dtype=torch.float64).to(dtype.to_real())
                operands.append(torch.view_as_complex(drawn.view(-1, 2)) if dtype.is_complex else drawn)
            terms = torch.stack([parts(operand) for operand in operands])
            exact, magnitude = terms.sum(0), terms.abs().sum(0)
            for op, expected, bound in [
                # Each partial sum is rounded; for an average in the type of its sums, and the result once more.
                ("SUM", exact, (size - 1) * unit * magnitude),
                ("AVG", exact / size, (size - 1) * sums * magnitude / size + unit * exact.abs() / size),
            ]:
                tensor = operands[rank].clone()
                dist.all_reduce(tensor, op=operation(op))
                # The reference's own rounding in double precision, and results too small for the type.
                slack = (
                    0.01 * bound
                    + size * torch.finfo(torch.float64).eps * magnitude
                    + 2 * unit * torch.finfo(dtype).tiny
                )
                wrong = ((parts(tensor) - expected).abs() > bound + slack).nonzero()
                assert len(wrong) == 0, (
                    f"{op} of {count} × {dtype}: {len(wrong)} wrong numbers, the first at {wrong[0]}"
                )
                digests.append(digest(tensor))
    return digests


def nan_wins_min_and_max(rank: int, size: int) -> list[str]:
    digests = []
    for dtype in FLOATS:
        for op in ("MIN", "MAX"):
            tensor = data(rank, 100, dtype)
            tensor[rank::size] = float("nan")
            tensor[0] = float("nan") if rank == 0 else 1.0
            dist.all_reduce(tensor, op=operation(op))
            if size > 1:
                assert_same(tensor, torch.full_like(tensor, float("nan")), f"{op} of {dtype}")
            digests.append(digest(tensor))
    return digests


def the_lesser_zero_is_the_negative_one(rank: int, size: int) -> list[str]:
    digests = []
    for dtype in FLOATS:
        for op, expected in ("MIN", -0.0), ("MAX", 0.0):
            # Positive and negative zeros on every rank; at each element, one rank alone has the other zero.
            tensor = torch.full((100,), -expected, dtype=dtype)
            tensor[rank::size] = expected
            dist.all_reduce(tensor, op=operation(op))
            assert_same(tensor, torch.full_like(tensor, expected), f"{op} of {dtype}")
            digests.append(digest(tensor))
    return digests


def booleans_reduce_logically(rank: int, size: int) -> None:
    operands = [data(r, COUNT, torch.bool) for r in range(size)]
    for op, same_as in [("SUM", "BOR"), ("MAX", "BOR"), ("PRODUCT", "BAND"), ("MIN", "BAND")]:
        result = operands[rank].clone()
        dist.all_reduce(result, op=operation(op))
        assert_same(result, reduced(operands, same_as), f"{op} of bool")


def unsigned_integers_reduce(rank: int, size: int) -> None:
    for dtype in UNSIGNED:
        operands = [data(r, COUNT, torch.int64, low=0) for r in range(size)]
        for op in ("SUM", "MIN", "MAX"):
            result = operands[rank].to(dtype)
            dist.all_reduce(result, op=operation(op))
            assert_same(result, reduced(operands, op).to(dtype), f"{op} of {dtype}")


def factors_multiply_before_the_sum(rank: int, size: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        expected = reduced([data(r, COUNT, dtype) * 0.5 for r in range(size)])
        for factor in (0.5, torch.tensor([0.5], dtype=dtype)):
            tensor = data(rank, COUNT, dtype)
            dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(factor))
            assert_same(tensor, expected, f"PREMUL_SUM of {dtype} by {factor}")
            part = torch.empty(COUNT // size, dtype=dtype)
            whole = data(rank, COUNT, dtype)[: COUNT // size * size].clone()
            dist.reduce_scatter_tensor(part, whole, op=dist._make_nccl_premul_sum(factor))
            assert_same(part, expected[rank * len(part) :][: len(part)], f"reduce_scatter by {factor}")


def averages_are_those_of_sums_that_do_not_fit(rank: int, size: int) -> None:
    largest = [(dtype, torch.iinfo(dtype).max - 1) for dtype in INTEGERS + UNSIGNED] + [(torch.float16, 30000.0)]
    for dtype, value in [*largest, (torch.complex32, complex(30000, -60000))]:
        whole = torch.full((COUNT,), value, dtype=dtype)
        result = whole.clone()
        dist.all_reduce(result, op=dist.ReduceOp.AVG)
        assert_same(result, whole, f"AVG of {dtype}")
        part = torch.empty(COUNT // size, dtype=dtype)
        dist.reduce_scatter_tensor(part, whole[: COUNT // size * size].clone(), op=dist.ReduceOp.AVG)
        assert_same(part, whole[: len(part)], f"reduce_scatter_tensor AVG of {dtype}")


def layouts_are_respected(rank: int, size: int) -> None:
    total = reduced([data(r, (6, 4)) for r in range(size)])

    scalar = data(rank, ())
    dist.all_reduce(scalar)
    assert_same(scalar, reduced([data(r, ()) for r in range(size)]), "zero-dim tensor")

    transposed = data(rank, (6, 4)).t()
    dist.all_reduce(transposed)
    assert_same(transposed, total.t(), "transposed tensor")

    whole = torch.full((6, 12), 99.0)
    view = whole[:, 1:9:2]
    view.copy_(data(rank, (6, 4)))
    dist.all_reduce(view)
    assert_same(view, total, "strided view")
    assert bool((whole[:, 0::2] == 99).all() and (whole[:, 9:] == 99).all()), "written outside the view"

    rows = torch.full((10, 4), 99.0)
    rows[2:8].copy_(data(rank, (6, 4)))
    dist.all_reduce(rows[2:8])
    assert_same(rows[2:8], total, "contiguous part of a tensor")
    assert bool((rows[:2] == 99).all() and (rows[8:] == 99).all()), "written outside the part"

    channels_last = data(rank, (2, 3, 4, 5)).to(memory_format=torch.channels_last)
    dist.all_reduce(channels_last)
    assert_same(channels_last, reduced([data(r, (2, 3, 4, 5)) for r in range(size)]), "channels_last tensor")


def inputs_of_any_layout_are_read(rank: int, size: int) -> None:
    expanded = data(rank, (1, 4)).expand(6, 4)
    for what, mine, make in [
        ("expanded", expanded, lambda r: data(r, (1, 4)).expand(6, 4)),
        ("transposed", data(rank, (4, 6)).t(), lambda r: data(r, (4, 6)).t()),
    ]:
        outputs = [torch.empty(6, 4) for _ in range(size)]
        dist.all_gather(outputs, mine)
        for r, output in enumerate(outputs):
            assert_same(output, make(r), f"all_gather of {what} input, slot {r}")
    outputs = [torch.empty(4, 6).t() for _ in range(size)]
    dist.all_gather(outputs, data(rank, (6, 4)))
    for r, output in enumerate(outputs):
        assert_same(output, data(r, (6, 4)), f"all_gather into transposed slot {r}")


def tensors_live_as_long_as_their_works(rank: int, size: int) -> None:
    works, gathered = [], [torch.empty(size * 50_000) for _ in range(10)]
    for i, output in enumerate(gathered):
        works.append(dist.all_gather_into_tensor(output, data(rank, 50_000, salt=i), async_op=True))
        torch.full((50_000,), float("nan"))  # takes the memory of an input if it was freed too early
    dropped = [dist.all_reduce(data(rank, 50_000), async_op=True) for _ in range(10)]
    del dropped
    for work in works:
        work.wait()
    for i, output in enumerate(gathered):
        expected = torch.cat([data(r, 50_000, salt=i) for r in range(size)])
        assert_same(output, expected, f"all_gather_into_tensor {i} of a dropped input")
    dist.barrier()


def unsupported_pairs_are_refused(rank: int, size: int) -> None:
    pairs = [(torch.float32, op) for op in BITWISE]
    pairs += [(torch.bfloat16, "BAND"), (torch.float8_e4m3fn, "SUM"), (torch.float8_e5m2, "MAX"), (torch.bool, "AVG")]
    for dtype, op in pairs:
        with pytest.raises(ValueError, match=rf"(?s)(?=.*{op})(?=.*{str(dtype).removeprefix('torch.')})"):
            dist.all_reduce(any_bits(rank, 8, dtype), op=operation(op))
    with pytest.raises(ValueError):
        dist.all_reduce(data(rank, 8, torch.complex64), op=dist.ReduceOp.MAX)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert_same(tensor, torch.full((3,), float(size)), "all_reduce after the refusals")


LAYOUT_CHECKS = [
    every_dtype_moves_bit_for_bit,
    booleans_reduce_logically,
    unsigned_integers_reduce,
    factors_multiply_before_the_sum,
    averages_are_those_of_sums_that_do_not_fit,
    layouts_are_respected,
    inputs_of_any_layout_are_read,
    tensors_live_as_long_as_their_works,
    unsupported_pairs_are_refused,
]


@pytest.mark.parametrize("check", LAYOUT_CHECKS, ids=lambda check: check.__name__)
def test_elements(world: World, check) -> None:
    world.run(check)


@pytest.mark.parametrize(
    ("dtypes", "ops"),
    [(INTEGERS, ARITHMETIC), (INTEGERS, BITWISE), (FLOATS, ARITHMETIC), (COMPLEX, ("SUM",))],
    ids=["integers", "integers_bitwise", "floats", "complex"],
)
def test_reduction_matches_reference_on_every_rank(world: World, dtypes, ops) -> None:
    digests = world.run(reductions, dtypes, ops)
    assert all(d == digests[0] for d in digests), f"ranks differ: {digests}"


@pytest.mark.parametrize("dtypes", [INTEGERS, FLOATS, COMPLEX], ids=["integers", "floats", "complex"])
def test_average_divides_by_the_number_of_ranks(world: World, dtypes) -> None:
    digests = world.run(reductions, dtypes, ("AVG",))
    assert all(d == digests[0] for d in digests), f"ranks differ: {digests}"


@pytest.mark.parametrize(
    "check",
    [rounding_is_the_same_on_every_rank, nan_wins_min_and_max, the_lesser_zero_is_the_negative_one],
    ids=lambda c: c.__name__,
)
def test_every_rank_gets_the_same_bits(world: World, check) -> None:
    digests = world.run(check)
    assert all(d == digests[0] for d in digests), f"ranks differ: {digests}"
