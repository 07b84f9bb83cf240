"""Every collective against a reference that each rank computes alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import World, fresh_store
from reference import LARGE, SIZES, assert_same, data, reduced

ALL_SIZES = (*SIZES, LARGE)


def all_reduce_sums(rank: int, size: int) -> None:
    for count in ALL_SIZES:
        tensor = data(rank, count)
        dist.all_reduce(tensor)
        assert_same(tensor, reduced([data(r, count) for r in range(size)]), f"all_reduce of {count}")


def reduce_reaches_the_root(rank: int, size: int) -> None:
    for root in range(size):
        for count in SIZES:
            tensor = data(rank, count, salt=root)
            dist.reduce(tensor, dst=root)
            if rank == root:
                expected = reduced([data(r, count, salt=root) for r in range(size)])
                assert_same(tensor, expected, f"reduce of {count} to {root}")


def broadcast_copies_the_root(rank: int, size: int) -> None:
    for root in range(size):
        for count in ALL_SIZES if root == 0 else SIZES:
            tensor = data(rank, count, torch.uint8)
            dist.broadcast(tensor, src=root)
            assert_same(tensor, data(root, count, torch.uint8), f"broadcast of {count} from {root}")


def all_gather_collects_every_rank(rank: int, size: int) -> None:
    for count in ALL_SIZES:
        outputs = [torch.full((count,), 99, dtype=torch.int8) for _ in range(size)]
        dist.all_gather(outputs, data(rank, count, torch.int8))
        for r, output in enumerate(outputs):
            assert_same(output, data(r, count, torch.int8), f"all_gather of {count}, slot {r}")


def all_gather_takes_other_shapes_of_each_rank(rank: int, size: int) -> None:
    shapes = [(3 * r + 1, 2) if r != 1 else (0, 2) for r in range(size)]
    outputs = [torch.full(shape, 99.0) for shape in shapes]
    dist.all_gather(outputs, data(rank, shapes[rank]))
    for r, output in enumerate(outputs):
        assert_same(output, data(r, shapes[r]), f"slot {r}")


def all_gather_into_tensor_concatenates(rank: int, size: int) -> None:
    for count in SIZES:
        output = torch.full((size * count,), 99.0)
        dist.all_gather_into_tensor(output, data(rank, count))
        assert_same(output, torch.cat([data(r, count) for r in range(size)]), f"{count} elements")


def all_gather_into_tensor_stacks(rank: int, size: int) -> None:
    stacked = torch.empty(size, 2, 3)
    dist.all_gather_into_tensor(stacked, data(rank, (2, 3)))
    assert_same(stacked, torch.stack([data(r, (2, 3)) for r in range(size)]), "stacked output")


def reduce_scatter_gives_each_rank_its_part(rank: int, size: int) -> None:
    for count in SIZES:
        output = torch.full((count,), 99.0)
        dist.reduce_scatter(output, [data(rank, count, salt=part) for part in range(size)])
        expected = reduced([data(r, count, salt=rank) for r in range(size)])
        assert_same(output, expected, f"reduce_scatter of {count}")


def reduce_scatter_takes_parts_of_other_sizes(rank: int, size: int) -> None:
    counts = [0 if part == 1 else 5 * part + 2 for part in range(size)]
    output = torch.full((counts[rank],), 99.0)
    dist.reduce_scatter(output, [data(rank, counts[part], salt=part) for part in range(size)])
    assert_same(output, reduced([data(r, counts[rank], salt=rank) for r in range(size)]), f"parts of {counts}")


def reduce_scatter_tensor_splits_the_sum(rank: int, size: int) -> None:
    for count in (*SIZES, LARGE // size):
        output = torch.full((count,), 99.0)
        dist.reduce_scatter_tensor(output, data(rank, size * count))
        total = reduced([data(r, size * count) for r in range(size)])
        assert_same(output, total[rank * count : (rank + 1) * count], f"{count} elements")


def all_to_all_exchanges_lists(rank: int, size: int) -> None:
    for count in SIZES:
        outputs = [torch.full((count,), 99.0) for _ in range(size)]
        dist.all_to_all(outputs, [data(rank, count, salt=to) for to in range(size)])
        for r, output in enumerate(outputs):
            assert_same(output, data(r, count, salt=rank), f"{count} elements from {r}")


def all_to_all_exchanges_uneven_lists(rank: int, size: int) -> None:
    def count(source: int, target: int) -> int:
        return (source * 7 + target * 3) % 5 * 11

    outputs = [torch.full((count(r, rank),), 99.0) for r in range(size)]
    dist.all_to_all(outputs, [data(rank, count(rank, to), salt=to) for to in range(size)])
    for r, output in enumerate(outputs):
        assert_same(output, data(r, count(r, rank), salt=rank), f"from {r}")


def all_to_all_single_transposes_blocks(rank: int, size: int) -> None:
    for count in (*SIZES, LARGE // size):
        output = torch.full((size * count,), 99, dtype=torch.int8)
        dist.all_to_all_single(output, data(rank, size * count, torch.int8))
        blocks = [data(r, size * count, torch.int8)[rank * count : (rank + 1) * count] for r in range(size)]
        assert_same(output, torch.cat(blocks), f"{count} elements")


def all_to_all_single_honours_split_sizes(rank: int, size: int) -> None:
    def splits(source: int) -> list[int]:
        return [(source + target) % 3 * 4 for target in range(size)]  # some are zero

    def part(source: int, target: int) -> torch.Tensor:
        return data(source, (sum(splits(source)), 3)).split(splits(source))[target]

    incoming = [splits(r)[rank] for r in range(size)]
    output = torch.full((sum(incoming), 3), 99.0)
    dist.all_to_all_single(output, data(rank, (sum(splits(rank)), 3)), incoming, splits(rank))
    assert_same(output, torch.cat([part(r, rank) for r in range(size)]), f"splits {incoming}")
    nothing = [0] * size
    dist.all_to_all_single(torch.empty(0), torch.empty(0), nothing, nothing)


def gather_collects_at_the_root(rank: int, size: int) -> None:
    for root in range(size):
        for count in SIZES:
            outputs = [torch.full((count,), 99.0) for _ in range(size)] if rank == root else None
            dist.gather(data(rank, count), outputs, dst=root)
            for r, output in enumerate(outputs or []):
                assert_same(output, data(r, count), f"gather of {count} at {root}, slot {r}")


def scatter_hands_out_from_the_root(rank: int, size: int) -> None:
    for root in range(size):
        for count in SIZES:
            inputs = [data(root, count, salt=to) for to in range(size)] if rank == root else None
            output = torch.full((count,), 99.0)
            dist.scatter(output, inputs, src=root)
            assert_same(output, data(root, count, salt=rank), f"scatter of {count} from {root}")


def outputs_that_share_memory_end_with_the_last(rank: int, size: int) -> None:
    shared = torch.empty(LARGE)
    dist.all_gather([shared] * size, data(rank, LARGE))
    assert_same(shared, data(size - 1, LARGE), "one tensor for every rank's")
    base = torch.empty(5 * size + 5)
    dist.all_gather([base[5 * r : 5 * r + 10] for r in range(size)], data(rank, 10))
    expected = torch.cat([*(data(r, 10)[:5] for r in range(size)), data(size - 1, 10)[5:]])
    assert_same(base, expected, "outputs that overlap by half")


def barrier_waits_for_the_last_rank(rank: int, size: int) -> None:
    store = fresh_store()
    for turn in range(size):
        if rank == turn:
            store.add(f"came{turn}", 1)  # unlike `set`, comes back once the store has it
        dist.barrier()
        assert store.check([f"came{turn}"]), f"rank {rank} left barrier {turn} before rank {turn} came"


def objects_travel(rank: int, size: int) -> None:
    def thing(r: int) -> dict[str, object]:
        return {"rank": r, "payload": "x" * (1000 * r), "nested": [None, r]}

    root = size - 1
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, thing(rank))
    assert gathered == [thing(r) for r in range(size)]
    copied = [thing(rank), rank]
    dist.broadcast_object_list(copied, src=root)
    assert copied == [thing(root), root]
    received: list[object] = [None]
    dist.scatter_object_list(received, [thing(r) for r in range(size)] if rank == root else None, src=root)
    assert received == [thing(rank)]
    at_root: list[object] | None = [None] * size if rank == root else None
    dist.gather_object(thing(rank), at_root, dst=root)
    assert rank != root or at_root == [thing(r) for r in range(size)]


def many_async_operations_complete(rank: int, size: int) -> None:
    tensors = [data(rank, 100 + i, salt=i) for i in range(64)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for i, tensor in enumerate(tensors):
        assert_same(tensor, reduced([data(r, 100 + i, salt=i) for r in range(size)]), f"all_reduce {i}")
        assert works[i].is_completed()


def different_async_operations_overlap(rank: int, size: int) -> None:
    total, copied, gathered = data(rank, 5000), data(rank, 5000), torch.empty(5000 * size)
    works = [
        dist.all_reduce(total, async_op=True),
        dist.broadcast(copied, src=size - 1, async_op=True),
        dist.all_gather_into_tensor(gathered, data(rank, 5000), async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in works:
        work.wait()
    assert_same(total, reduced([data(r, 5000) for r in range(size)]), "all_reduce")
    assert_same(copied, data(size - 1, 5000), "broadcast")
    assert_same(gathered, torch.cat([data(r, 5000) for r in range(size)]), "all_gather_into_tensor")


CHECKS = [
    all_reduce_sums,
    reduce_reaches_the_root,
    broadcast_copies_the_root,
    all_gather_collects_every_rank,
    all_gather_takes_other_shapes_of_each_rank,
    all_gather_into_tensor_concatenates,
    all_gather_into_tensor_stacks,
    reduce_scatter_gives_each_rank_its_part,
    reduce_scatter_takes_parts_of_other_sizes,
    reduce_scatter_tensor_splits_the_sum,
    all_to_all_exchanges_lists,
    all_to_all_exchanges_uneven_lists,
    all_to_all_single_transposes_blocks,
    all_to_all_single_honours_split_sizes,
    gather_collects_at_the_root,
    scatter_hands_out_from_the_root,
    outputs_that_share_memory_end_with_the_last,
    barrier_waits_for_the_last_rank,
    objects_travel,
    many_async_operations_complete,
    different_async_operations_overlap,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_collective(world: World, check) -> None:
    world.run(check)


@pytest.mark.worlds(sizes=(8,), modes=("shm",))
@pytest.mark.parametrize(
    "check", [all_to_all_single_honours_split_sizes, objects_travel, many_async_operations_complete]
)
def test_collective_of_eight(world: World, check) -> None:
    world.run(check)
