"""The operators torch.ops.ncclx_rs.all_reduce_ and its sisters: collectives by a group's name, also compiled."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import World
from reference import assert_same, data, reduced

SIZES = (2, 3)
ops = torch.ops.ncclx_rs


def name() -> str:
    return str(dist.group.WORLD.group_name)


def operators_match_reference(rank: int, size: int) -> None:
    inputs = [data(r, (size * 2, 3)) for r in range(size)]
    total = inputs[rank].clone()
    assert ops.all_reduce_(total, name()) is None
    assert_same(total, reduced(inputs), "all_reduce_")
    highest = inputs[rank].clone()
    ops.all_reduce_(highest, name(), "max")
    assert_same(highest, torch.stack(inputs).amax(0), "all_reduce_ of max")
    gathered = torch.empty(size * size * 2, 3)
    ops.all_gather_into_tensor_(gathered, inputs[rank], name())
    assert_same(gathered, torch.cat(inputs), "all_gather_into_tensor_")
    part = torch.empty(2, 3)
    ops.reduce_scatter_tensor_(part, inputs[rank], name())
    assert_same(part, reduced(inputs)[rank * 2 : rank * 2 + 2], "reduce_scatter_tensor_")
    lowest = torch.empty(2, 3)
    ops.reduce_scatter_tensor_(lowest, inputs[rank], name(), "min")
    assert_same(lowest, torch.stack(inputs).amin(0)[rank * 2 : rank * 2 + 2], "reduce_scatter_tensor_ of min")
    exchanged = torch.empty(size * 2, 3)
    ops.all_to_all_single_(exchanged, inputs[rank], name())
    assert_same(exchanged, torch.cat([t[rank * 2 : rank * 2 + 2] for t in inputs]), "all_to_all_single_")
    # Rank r sends r + 1 rows to each rank.
    sent = torch.full((size * (rank + 1), 2), float(rank))
    rows = [r + 1 for r in range(size)]
    received = torch.empty(sum(rows), 2)
    ops.all_to_all_single_(received, sent, name(), rows, [rank + 1] * size)
    parts = [torch.full((r + 1, 2), float(r)) for r in range(size)]
    assert_same(received, torch.cat(parts), "all_to_all_single_ with sizes")


def operators_take_what_the_backend_takes(rank: int, size: int) -> None:
    """Any element type, and tensors that are not contiguous: the backend is the one of dist.all_reduce."""
    strided = torch.full((4, 6), float(rank)).t()
    ops.all_reduce_(strided, name())
    assert_same(strided, torch.full((6, 4), float(sum(range(size)))), "a transposed tensor")
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        tensor = torch.full((5,), rank + 1, dtype=dtype)
        ops.all_reduce_(tensor, name(), "product")
        expected = torch.tensor([r + 1 for r in range(size)]).prod().item()
        assert_same(tensor, torch.full((5,), expected, dtype=dtype), str(dtype))
    alone = dist.new_group([rank], use_local_synchronization=True)
    tensor = torch.ones(3)
    ops.all_reduce_(tensor, alone.group_name)
    assert_same(tensor, torch.ones(3), "a sub-group")


def mistakes_are_named(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"all_reduce_: argument `op`: expected sum, avg, .*, got `mean`"):
        ops.all_reduce_(torch.ones(2), name(), "mean")
    with pytest.raises(ValueError, match=r"reduce_scatter_tensor_: argument `op`"):
        ops.reduce_scatter_tensor_(torch.ones(1), torch.ones(size), name(), "SUM")
    with pytest.raises(ValueError, match="argument `group_name`: expected the name of a process group .*, got ``"):
        ops.all_reduce_(torch.ones(2), "")
    with pytest.raises(ValueError, match=r"all_gather_into_tensor_: argument `group_name`: .*, got `elsewhere`"):
        ops.all_gather_into_tensor_(torch.empty(2 * size), torch.ones(2), "elsewhere")
    with pytest.raises(ValueError, match="all_gather: argument `output`"):
        ops.all_gather_into_tensor_(torch.empty(1), torch.ones(2), name())
    with pytest.raises(ValueError, match="all_to_all_single: argument `output_split_sizes`"):
        ops.all_to_all_single_(torch.ones(size), torch.ones(size), name(), [1], [])
    total = torch.ones(2)
    ops.all_reduce_(total, name())
    assert_same(total, torch.full((2,), float(size)), "the group works on")


def layer(tensor: torch.Tensor, group: str, size: int) -> tuple[torch.Tensor, ...]:
    doubled = tensor * 2
    ops.all_reduce_(doubled, group)
    gathered = doubled.new_empty(doubled.shape[0] * size, *doubled.shape[1:])
    ops.all_gather_into_tensor_(gathered, doubled + 1, group)
    part = torch.empty_like(doubled)
    ops.reduce_scatter_tensor_(part, gathered * 1, group, "max")
    exchanged = torch.empty_like(gathered)
    ops.all_to_all_single_(exchanged, gathered - 1, group)
    return doubled, gathered, part, exchanged


def operators_compile_in_one_graph(rank: int, size: int) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for rows in (4, 6):  # the second has dynamic shapes
        tensor = data(rank, (rows, 3))
        for got, want in zip(compiled(tensor, name(), size), layer(tensor, name(), size), strict=True):
            assert_same(got, want, f"{rows} rows")


def operators_run_on_meta_tensors(rank: int, size: int) -> None:
    for result in layer(torch.empty(4, 3, device="meta"), name(), size):
        assert result.is_meta
    with pytest.raises(ValueError, match="argument `op`"):
        ops.all_reduce_(torch.empty(2, device="meta"), name(), "mean")


def schemas_are_true(rank: int, size: int) -> None:
    tensor = data(rank, (size, 3))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.all_reduce_.default, (tensor, name(), "sum"), test_utils=tests)
    torch.library.opcheck(
        ops.all_gather_into_tensor_.default, (torch.empty(size * size, 3), tensor, name()), test_utils=tests
    )
    torch.library.opcheck(
        ops.reduce_scatter_tensor_.default, (torch.empty(1, 3), tensor, name(), "sum"), test_utils=tests
    )
    torch.library.opcheck(
        ops.all_to_all_single_.default, (torch.empty(size, 3), tensor, name(), [], []), test_utils=tests
    )


CHECKS = [
    operators_match_reference,
    operators_take_what_the_backend_takes,
    mistakes_are_named,
    operators_compile_in_one_graph,
    operators_run_on_meta_tensors,
    schemas_are_true,
]


@pytest.mark.worlds(sizes=SIZES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_operators(world: World, check) -> None:
    world.run(check)
