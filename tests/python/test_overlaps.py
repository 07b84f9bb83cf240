"""Operands that share memory: the results on all ranks equal gloo's, or all ranks get an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from harness import World
from reference import LARGE, assert_same, data, reduced
from torch.distributed.distributed_c10d import _coalescing_manager

pytestmark = pytest.mark.worlds(sizes=(2, 3))

CPU = torch.device("cpu")
# One message; and many chunks, whose reads and writes the engine interleaves.
COUNTS = (8, 100_000)


class Ranks:
    """The ranks of a case, and its way to pass inputs that share memory with outputs."""

    def __init__(self, rank: int, size: int, count: int, group: dist.ProcessGroup, shares: bool) -> None:
        self.rank, self.size, self.count, self.group = rank, size, count, group
        # Gloo itself mixes up some operands of one operation. It gets copies, whose results are the expected ones.
        self.read: Callable[[torch.Tensor], torch.Tensor] = (lambda tensor: tensor) if shares else torch.clone

    def part(self, salt: int = 0) -> torch.Tensor:
        return data(self.rank, self.count, salt=salt)

    def parts(self) -> list[torch.Tensor]:
        return [self.part(salt) for salt in range(self.size)]


def one_tensor_twice(ranks: Ranks) -> list[torch.Tensor]:
    tensor = ranks.part()
    dist.all_reduce_coalesced([tensor, tensor], group=ranks.group)
    return [tensor]


def views_that_overlap(ranks: Ranks) -> list[torch.Tensor]:
    tensor, half = ranks.part(), ranks.count // 2
    dist.all_reduce_coalesced([tensor[: half + 3], tensor[half - 3 :]], group=ranks.group)
    return [tensor]


def columns_and_the_whole(ranks: Ranks) -> list[torch.Tensor]:
    tensor = torch.stack([ranks.part(), ranks.part(1)], 1)
    dist.all_reduce_coalesced([tensor[:, 0], tensor, tensor[:, 1]], group=ranks.group)
    return [tensor]


def one_tensor_twice_in_the_manager(ranks: Ranks) -> list[torch.Tensor]:
    tensor = ranks.part()
    with _coalescing_manager(group=ranks.group):
        dist.all_reduce(tensor, group=ranks.group)
        dist.all_reduce(tensor, group=ranks.group)
    return [tensor]


def gathers_into_one_tensor(ranks: Ranks) -> list[torch.Tensor]:
    output = torch.zeros(ranks.count * ranks.size)
    with _coalescing_manager(group=ranks.group):
        dist.all_gather_into_tensor(output, ranks.part(), group=ranks.group)
        dist.all_gather_into_tensor(output, ranks.part(5), group=ranks.group)
    return [output]


def gathers_into_a_column_and_its_neighbours(ranks: Ranks) -> list[torch.Tensor]:
    whole = ranks.count * ranks.size
    output = torch.zeros(whole, 2)
    with _coalescing_manager(group=ranks.group):
        dist.all_gather_into_tensor(output[:, 0], ranks.part(), group=ranks.group)
        dist.all_gather_into_tensor(output.view(-1)[:whole], ranks.part(5), group=ranks.group)
    return [output]


def gathers_of_what_another_writes(ranks: Ranks) -> list[torch.Tensor]:
    first, second = torch.cat(ranks.parts()), torch.zeros(ranks.count * ranks.size)
    with _coalescing_manager(group=ranks.group):
        dist.all_gather_into_tensor(first, ranks.part(9), group=ranks.group)
        dist.all_gather_into_tensor(second, first[ranks.count : 2 * ranks.count], group=ranks.group)
    return [first, second]


def scatters_of_what_another_writes(ranks: Ranks) -> list[torch.Tensor]:
    read, output = torch.cat(ranks.parts()), torch.zeros(ranks.count)
    with _coalescing_manager(group=ranks.group):
        dist.reduce_scatter_tensor(read[: ranks.count], ranks.part(9).repeat(ranks.size), group=ranks.group)
        dist.reduce_scatter_tensor(output, read, group=ranks.group)
    return [read, output]


def gather_of_an_output(ranks: Ranks) -> list[torch.Tensor]:
    outputs = ranks.parts()
    dist.all_gather(outputs, ranks.read(outputs[0]), group=ranks.group)
    return outputs


def gather_into_one_tensor_of_itself(ranks: Ranks) -> list[torch.Tensor]:
    tensor = ranks.part()
    dist.all_gather([tensor] * ranks.size, ranks.read(tensor), group=ranks.group)
    return [tensor]


def gather_of_the_own_part(ranks: Ranks) -> list[torch.Tensor]:
    output = torch.cat(ranks.parts())
    own = output[ranks.rank * ranks.count : (ranks.rank + 1) * ranks.count]
    dist.all_gather_into_tensor(output, ranks.read(own), group=ranks.group)
    return [output]


def gather_of_a_part_between_two(ranks: Ranks) -> list[torch.Tensor]:
    output = torch.cat(ranks.parts())
    dist.all_gather_into_tensor(output, ranks.read(output[3 : ranks.count + 3]), group=ranks.group)
    return [output]


def gather_at_the_root_of_an_output(ranks: Ranks) -> list[torch.Tensor]:
    outputs = ranks.parts()
    dist.gather(ranks.read(outputs[1]), outputs if ranks.rank == 0 else None, group=ranks.group)
    return outputs


def scatter_at_the_root_into_an_input(ranks: Ranks) -> list[torch.Tensor]:
    inputs = ranks.parts()
    given = [ranks.read(tensor) for tensor in inputs] if ranks.rank == 0 else None
    dist.scatter(inputs[1], given, group=ranks.group)
    return inputs


def reduce_scatter_into_an_input(ranks: Ranks) -> list[torch.Tensor]:
    inputs = ranks.parts()
    dist.reduce_scatter(inputs[0], [ranks.read(tensor) for tensor in inputs], group=ranks.group)
    return inputs


def reduce_scatter_of_one_tensor_into_itself(ranks: Ranks) -> list[torch.Tensor]:
    tensor = ranks.part()
    dist.reduce_scatter(tensor, [ranks.read(tensor)] * ranks.size, group=ranks.group)
    return [tensor]


def reduce_scatter_into_the_own_part(ranks: Ranks) -> list[torch.Tensor]:
    tensor = torch.cat(ranks.parts())
    own = tensor[ranks.rank * ranks.count : (ranks.rank + 1) * ranks.count]
    dist.reduce_scatter_tensor(own, ranks.read(tensor), group=ranks.group)
    return [tensor]


def reduce_scatter_into_a_part_between_two(ranks: Ranks) -> list[torch.Tensor]:
    tensor = torch.cat(ranks.parts())
    dist.reduce_scatter_tensor(tensor[3 : ranks.count + 3], ranks.read(tensor), group=ranks.group)
    return [tensor]


def all_to_all_in_place(ranks: Ranks) -> list[torch.Tensor]:
    parts = ranks.parts()
    dist.all_to_all(parts, [ranks.read(part) for part in parts], group=ranks.group)
    tensor = torch.cat(ranks.parts())
    dist.all_to_all_single(tensor, ranks.read(tensor), group=ranks.group)
    return [*parts, tensor]


def all_to_all_a_part_further(ranks: Ranks) -> list[torch.Tensor]:
    tensor = torch.cat([*ranks.parts(), ranks.part(9)])
    whole = ranks.count * ranks.size
    dist.all_to_all_single(tensor[:whole], ranks.read(tensor[ranks.count :]), group=ranks.group)
    return [tensor]


CASES = (
    one_tensor_twice,
    views_that_overlap,
    columns_and_the_whole,
    one_tensor_twice_in_the_manager,
    gathers_into_one_tensor,
    gathers_into_a_column_and_its_neighbours,
    gathers_of_what_another_writes,
    scatters_of_what_another_writes,
    gather_of_an_output,
    gather_into_one_tensor_of_itself,
    gather_of_the_own_part,
    gather_of_a_part_between_two,
    gather_at_the_root_of_an_output,
    scatter_at_the_root_into_an_input,
    reduce_scatter_into_an_input,
    reduce_scatter_of_one_tensor_into_itself,
    reduce_scatter_into_the_own_part,
    reduce_scatter_into_a_part_between_two,
    all_to_all_in_place,
    all_to_all_a_part_further,
)


def operands_share_memory_as_with_gloo(rank: int, size: int) -> None:
    gloo = dist.new_group(backend="gloo")
    wrong = []
    for case in CASES:
        for count in COUNTS:
            expected = case(Ranks(rank, size, count, gloo, shares=False))
            for i, tensor in enumerate(case(Ranks(rank, size, count, dist.group.WORLD, shares=True))):
                try:
                    assert_same(tensor, expected[i], f"{case.__name__}, {count} elements, tensor {i}")
                except AssertionError as error:
                    wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_operands_share_memory_as_with_gloo(world: World) -> None:
    world.run(operands_share_memory_as_with_gloo)


def coalesced_operations_take_their_order(rank: int, size: int) -> None:
    """Gloo does not coalesce; the expected results are those of the operations one after the other."""
    for count in COUNTS:
        tensor = torch.stack([data(rank, count), data(rank, count, salt=1)], 1)
        reduced = torch.zeros(count)
        with _coalescing_manager(device=CPU, async_ops=True) as manager:
            dist.broadcast(tensor[:, 0], src=0)
            dist.broadcast(tensor, src=1)
            dist.broadcast(tensor[:, 1], src=0)
            dist.reduce_scatter(reduced, [tensor[:, 0]] * size)
        manager.wait()
        assert_same(tensor[:, 0], data(0, count), "the first column, which rank 1 had from the first broadcast")
        assert_same(tensor[:, 1], data(1, count, salt=1), "the second column, which rank 0 had from the second")
        assert_same(reduced, data(0, count) * size, "the sum of the first column")


def coalesced_messages_come_after_collectives(rank: int, size: int) -> None:
    group, after, before = dist.group.WORLD, (rank + 1) % size, (rank - 1) % size
    tensor, got, passed_on = data(rank, LARGE), torch.empty(LARGE), torch.ones(LARGE)
    group._start_coalescing(CPU)  # the manager would put off the all_reduce until the end of the block
    group.allreduce([tensor])
    dist.irecv(got, before)
    dist.isend(tensor, after)
    # A message that waited for another one would do so on all ranks. What comes is what is there.
    dist.irecv(passed_on, before, tag=1)
    dist.isend(passed_on, after, tag=1)
    group._end_coalescing(CPU).wait()
    assert_same(got, reduced([data(r, LARGE) for r in range(size)]), "the sum, sent by the rank before")
    assert_same(passed_on, torch.ones(LARGE), "what went round")


def empty_lists_are_refused(rank: int, size: int) -> None:
    backend = dist.group.WORLD._get_backend(CPU)
    with pytest.raises(ValueError, match="argument `tensors`: expected at least one tensor, got an empty list"):
        backend.allreduce_coalesced([])
    with pytest.raises(ValueError, match="argument `input_list`: expected at least one tensor, got an empty list"):
        backend.allgather_coalesced([[] for _ in range(size)], [])


@pytest.mark.parametrize(
    "check",
    [coalesced_operations_take_their_order, coalesced_messages_come_after_collectives, empty_lists_are_refused],
    ids=lambda c: c.__name__,
)
def test_coalesced(world: World, check) -> None:
    world.run(check)
