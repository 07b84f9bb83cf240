"""Point-to-point: matching, order, two ranks that both send first, and messages beside collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import World
from reference import LARGE, SIZES, assert_same, data, reduced

pytestmark = pytest.mark.worlds(sizes=(2, 3, 4))


def neighbours(rank: int, size: int) -> tuple[int, int]:
    return (rank + 1) % size, (rank - 1) % size


def send_reaches_the_receiver(rank: int, size: int) -> None:
    for count in (*SIZES, LARGE):
        if rank == 0:
            for to in range(1, size):
                dist.send(data(0, count, salt=to), dst=to)
        else:
            tensor = torch.full((count,), 99.0)
            source = dist.recv(tensor, src=0)
            assert source == 0
            assert_same(tensor, data(0, count, salt=rank), f"{count} elements from 0")


def isend_and_irecv_pass_round_a_ring(rank: int, size: int) -> None:
    after, before = neighbours(rank, size)
    for count in (*SIZES, LARGE):
        tensor = torch.full((count,), 99.0)
        works = [dist.isend(data(rank, count), dst=after), dist.irecv(tensor, src=before)]
        for work in works:
            work.wait()
        assert_same(tensor, data(before, count), f"{count} elements from {before}")


def both_sides_may_send_first(rank: int, size: int) -> None:
    if rank > 1:
        return
    other = 1 - rank
    for count in (1, 65537, LARGE):
        work = dist.isend(data(rank, count), dst=other)
        tensor = torch.full((count,), 99.0)
        dist.recv(tensor, src=other)
        work.wait()
        assert_same(tensor, data(other, count), f"{count} elements from {other}")


def every_rank_may_send_to_every_other_first(rank: int, size: int) -> None:
    others = [r for r in range(size) if r != rank]
    sends = [dist.isend(data(rank, 300_000, salt=r), dst=r) for r in others]
    for r in others:
        tensor = torch.empty(300_000)
        dist.recv(tensor, src=r)
        assert_same(tensor, data(r, 300_000, salt=rank), f"from {r}")
    for work in sends:
        work.wait()


def tags_tell_messages_apart(rank: int, size: int) -> None:
    tags, count = (5, 1, 9, 0, 2**20), 70_000
    if rank == 0:
        works = [dist.isend(data(0, count, salt=tag), dst=1, tag=tag) for tag in tags]
        for work in works:
            work.wait()
    elif rank == 1:
        for tag in sorted(tags):
            tensor = torch.empty(count)
            dist.recv(tensor, src=0, tag=tag)
            assert_same(tensor, data(0, count, salt=tag), f"tag {tag}")


def messages_of_one_tag_keep_their_order(rank: int, size: int) -> None:
    counts = [1, 200_000, 0, 7, 65537, 2]  # small ones must not overtake large ones
    if rank == 0:
        works = [dist.isend(data(0, count, salt=i), dst=1) for i, count in enumerate(counts)]
        for work in works:
            work.wait()
    elif rank == 1:
        tensors = [torch.full((count,), 99.0) for count in counts]
        works = [dist.irecv(tensor, src=0) for tensor in tensors]
        for i in reversed(range(len(counts))):
            works[i].wait()
        for i, tensor in enumerate(tensors):
            assert_same(tensor, data(0, counts[i], salt=i), f"message {i}")


def receive_from_any_source_names_it(rank: int, size: int) -> None:
    if rank != 0:
        dist.send(data(rank, 50), dst=0)
        dist.send(data(rank, 70_000), dst=0, tag=3)
        return
    for count, tag in ((50, 0), (70_000, 3)):
        sources = []
        for _ in range(size - 1):
            tensor = torch.empty(count)
            source = dist.recv(tensor, tag=tag)
            sources.append(source)
            assert_same(tensor, data(source, count), f"from any source, said to be {source}")
        assert sorted(sources) == list(range(1, size)), sources


def batch_of_sends_and_receives_is_concurrent(rank: int, size: int) -> None:
    after, before = neighbours(rank, size)
    for count in (0, 1, 65537, 1_000_000):
        from_before, from_after = torch.empty(count), torch.empty(count)
        # Receives come first on every rank: if they ran one after the other, they would never end.
        batch = [
            dist.P2POp(dist.irecv, from_before, before, tag=1),
            dist.P2POp(dist.irecv, from_after, after, tag=2),
            dist.P2POp(dist.isend, data(rank, count, salt=1), after, tag=1),
            dist.P2POp(dist.isend, data(rank, count, salt=2), before, tag=2),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert_same(from_before, data(before, count, salt=1), f"{count} elements from {before}")
        assert_same(from_after, data(after, count, salt=2), f"{count} elements from {after}")


def point_to_point_runs_beside_collectives(rank: int, size: int) -> None:
    after, before = neighbours(rank, size)
    received = torch.empty(100_000)
    work = dist.irecv(received, src=before)  # pending while the collectives run
    for i in range(5):
        tensor = data(rank, 10_000, salt=i)
        dist.all_reduce(tensor)
        assert_same(tensor, reduced([data(r, 10_000, salt=i) for r in range(size)]), f"all_reduce {i}")
    dist.send(data(rank, 100_000), dst=after)
    work.wait()
    assert_same(received, data(before, 100_000), f"from {before}")


def non_contiguous_tensors_are_received_in_place(rank: int, size: int) -> None:
    if rank == 0:
        dist.send(data(0, (30, 20)).t(), dst=1)
    elif rank == 1:
        whole = torch.full((20, 60), 99.0)
        dist.recv(whole[:, ::2], src=0)
        assert_same(whole[:, ::2], data(0, (30, 20)).t(), "received columns")
        assert bool((whole[:, 1::2] == 99).all()), "the gaps of a strided view were written to"


def group_ranks_address_members(rank: int, size: int) -> None:
    group = dist.new_group(list(reversed(range(size))), sort_ranks=False) if _can_keep_order() else dist.group.WORLD
    mine = dist.get_rank(group)
    after, before = neighbours(mine, size)
    received = torch.empty(10)
    work = dist.irecv(received, group=group, group_src=before)
    dist.send(data(mine, 10), group=group, group_dst=after)
    work.wait()
    assert_same(received, data(before, 10), f"from group rank {before}")


def _can_keep_order() -> bool:
    import inspect

    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def hundreds_of_messages_arrive(rank: int, size: int) -> None:
    after, before = neighbours(rank, size)
    received = [torch.empty(i % 50 * 10) for i in range(300)]
    works = [dist.irecv(tensor, src=before, tag=i % 4) for i, tensor in enumerate(received)]
    works += [dist.isend(data(rank, i % 50 * 10, salt=i), dst=after, tag=i % 4) for i in range(300)]
    for work in works:
        work.wait()
    for i, tensor in enumerate(received):
        assert_same(tensor, data(before, i % 50 * 10, salt=i), f"message {i}")


CHECKS = [
    send_reaches_the_receiver,
    isend_and_irecv_pass_round_a_ring,
    both_sides_may_send_first,
    every_rank_may_send_to_every_other_first,
    tags_tell_messages_apart,
    messages_of_one_tag_keep_their_order,
    receive_from_any_source_names_it,
    batch_of_sends_and_receives_is_concurrent,
    point_to_point_runs_beside_collectives,
    non_contiguous_tensors_are_received_in_place,
    group_ranks_address_members,
    hundreds_of_messages_arrive,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_point_to_point(world: World, check) -> None:
    world.run(check)


@pytest.mark.worlds(sizes=(8,), modes=("shm",))
@pytest.mark.parametrize("check", [every_rank_may_send_to_every_other_first, receive_from_any_source_names_it])
def test_point_to_point_of_eight(world: World, check) -> None:
    world.run(check)
