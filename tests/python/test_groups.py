"""Sub-groups: members and other ranks, overlap, splitting, creation and destruction."""

from __future__ import annotations

import datetime
import os
import threading

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, descriptors, joined, leaving_together, set_timeout
from reference import assert_same, data, reduced
from test_peer_loss import until


def assert_group_works(group: dist.ProcessGroup | None, members: list[int], what: str) -> None:
    tensor = data(dist.get_rank(), 100)
    dist.all_reduce(tensor, group=group)
    assert_same(tensor, reduced([data(r, 100) for r in members]), what)


def the_group_runs_on_the_backend_under_test(rank: int, size: int) -> None:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert dist.get_backend() == BACKEND
    assert backend.name() == BACKEND, f"collectives on CPU run on {backend.name()} ({type(backend)}), not on {BACKEND}"
    assert (backend.rank(), backend.size()) == (rank, size)


def overlapping_groups_work_side_by_side(rank: int, size: int) -> None:
    memberships = [[0, 1], list(range(1, size)), list(range(0, size, 2)), [size - 1], list(range(size))]
    groups = [dist.new_group(members) for members in memberships]
    for _ in range(3):
        for group, members in zip(groups, memberships, strict=True):
            if rank in members:
                assert dist.get_rank(group) == members.index(rank)
                assert_group_works(group, members, f"group {members}")
            else:
                assert group == dist.GroupMember.NON_GROUP_MEMBER
                assert dist.get_rank(group) == -1
    assert_group_works(None, list(range(size)), "the default group")


def operations_of_two_groups_interleave(rank: int, size: int) -> None:
    other = dist.new_group(list(range(size)))
    tensors = [data(rank, 10_000, salt=i) for i in range(20)]
    works = [dist.all_reduce(t, group=other if i % 2 else None, async_op=True) for i, t in enumerate(tensors)]
    # Odd ranks wait in another order: no group's progress may depend on another group's waits.
    for work in works if rank % 2 else works[::-1]:
        work.wait()
    for i, tensor in enumerate(tensors):
        assert_same(tensor, reduced([data(r, 10_000, salt=i) for r in range(size)]), f"operation {i}")


def threads_use_groups_of_their_own(rank: int, size: int) -> None:
    groups = [dist.new_group(list(range(size))) for _ in range(3)]
    wrong: list[BaseException] = []

    def use(group: dist.ProcessGroup) -> None:
        try:
            for _ in range(20):
                assert_group_works(group, list(range(size)), "a thread's group")
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def roots_are_global_ranks(rank: int, size: int) -> None:
    members = list(range(1, size))
    group = dist.new_group(members)
    if rank in members:
        tensor = data(rank, 10)
        dist.broadcast(tensor, src=size - 1, group=group)
        assert_same(tensor, data(size - 1, 10), "broadcast from a global rank")


def subgroups_partition_the_world(rank: int, size: int) -> None:
    mine, _ = dist.new_subgroups(group_size=2)
    first = rank // 2 * 2
    assert_group_works(mine, [first, first + 1], "new_subgroups")
    mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    assert_group_works(mine, [0, 3] if rank in (0, 3) else [1, 2], "new_subgroups_by_enumeration")


def groups_split(rank: int, size: int) -> None:
    parent = dist.group.WORLD
    if not parent._get_backend(torch.device("cpu")).supports_splitting:
        raise AssertionError(f"{BACKEND} cannot split")
    ranks = [list(range(0, size, 2)), list(range(1, size, 2))]
    try:
        child = dist.split_group(split_ranks=ranks)
    except (RuntimeError, ValueError) as error:
        if "device" in str(error):
            pytest.skip(f"this torch splits only groups that are bound to an accelerator: {error}")
        raise
    mine = ranks[rank % 2]
    assert child is not None and dist.get_rank(child) == mine.index(rank)
    assert child._get_backend(torch.device("cpu")).name() == BACKEND
    assert_group_works(child, mine, "a split group")
    nobody_else = dist.split_group(split_ranks=[[0]])
    assert (nobody_else in (None, dist.GroupMember.NON_GROUP_MEMBER)) == (rank != 0)
    assert_group_works(parent, list(range(size)), "the parent after splits")
    if rank == 0:
        dist.destroy_process_group(nobody_else)
    dist.destroy_process_group(child)
    assert_group_works(parent, list(range(size)), "the parent after its children are gone")


def meshes_nest_groups(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
    half = size // 2
    row = [r for r in range(size) if r // half == rank // half]
    column = [r for r in range(size) if r % half == rank % half]
    assert mesh["inner"].get_group()._get_backend(torch.device("cpu")).name() == BACKEND
    assert_group_works(mesh["inner"].get_group(), row, "the inner dimension")
    assert_group_works(mesh["outer"].get_group(), column, "the outer dimension")


def groups_give_their_resources_back(rank: int, size: int) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    with joined():
        for turn in range(30):
            group = dist.new_group(list(range(size)))
            assert_group_works(group, list(range(size)), "a short-lived group")
            dist.barrier(group)
            dist.destroy_process_group(group)
            del group
            if turn == 10:
                files, tasks = descriptors(), threads()
        # What is left of one or two is no leak; something of each of 20 groups is.
        assert descriptors(files + 10) <= files + 10, f"file descriptors grew from {files} to {descriptors()}"
        until(lambda: threads() <= tasks + 10, f"there are no more threads than {tasks} and some")


def default_groups_come_and_go(rank: int, size: int) -> None:
    for _ in range(10):
        with joined():
            assert_group_works(None, list(range(size)), "a default group")
        assert not dist.is_initialized()


def destroying_twice_is_refused_clearly(rank: int, size: int) -> None:
    with joined():
        group = dist.new_group(list(range(size)))
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="[Ii]nvalid process group"):
            dist.destroy_process_group(group)
        assert_group_works(None, list(range(size)), "the default group")


def destroying_with_pending_work_returns(rank: int, size: int) -> None:
    with joined(timeout=10):
        works = []
        if rank != 0:  # rank 0 never calls it: the operation can only be aborted
            works.append(dist.all_reduce(torch.ones(1000), async_op=True))
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        for work in works:
            with pytest.raises(RuntimeError):
                work.wait()


def use_after_destroy_is_a_clear_error(rank: int, size: int) -> None:
    with joined():
        group = dist.group.WORLD
        assert_group_works(None, list(range(size)), "the group before it is destroyed")
    with pytest.raises((ValueError, RuntimeError), match="(?i)process group|shut down|destroyed"):
        dist.all_reduce(torch.ones(1), group=group)
    with pytest.raises(ValueError, match="not been initialized"):
        dist.all_reduce(torch.ones(1))


def backend_refuses_work_after_shutdown(rank: int, size: int) -> None:
    with joined():
        group = dist.group.WORLD
        dist.barrier()
        group.shutdown()
        with pytest.raises(dist.DistBackendError, match="all_reduce.*(shut down|aborted)"):
            dist.all_reduce(torch.ones(1))
        group.shutdown()  # harmless


def new_timeouts_apply(rank: int, size: int) -> None:
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=25))
    set_timeout(group, 2)
    with leaving_together():
        if rank != 0:
            with pytest.raises(dist.DistBackendError, match=r"all_reduce.*timed out after a timeout of 2\."):
                dist.all_reduce(torch.ones(1), group=group)


def halves_split_under_one_name(rank: int, size: int) -> None:
    """A group's own method, unlike `dist.split_group`, leaves the name to the caller."""
    mine = [r for r in range(size) if r % 2 == rank % 2]
    parent = dist.group.WORLD
    try:
        child = parent.split_group(mine, group_name="half")
    except RuntimeError as error:
        if "default device" not in str(error):
            raise
        pytest.skip(f"this torch splits only groups that are bound to an accelerator: {error}")
    backend = child._get_backend(torch.device("cpu"))
    assert (backend.rank(), backend.size()) == (mine.index(rank), len(mine))
    tensor = data(rank, 100)
    child.allreduce([tensor]).wait()
    assert_same(tensor, reduced([data(r, 100) for r in mine]), "one half")
    backend.shutdown()


ANYWHERE = [
    the_group_runs_on_the_backend_under_test,
    operations_of_two_groups_interleave,
    threads_use_groups_of_their_own,
]
SEVERAL_RANKS = [
    halves_split_under_one_name,
    overlapping_groups_work_side_by_side,
    roots_are_global_ranks,
    groups_split,
]
LIVES = [
    groups_give_their_resources_back,
    default_groups_come_and_go,
    destroying_twice_is_refused_clearly,
    use_after_destroy_is_a_clear_error,
    backend_refuses_work_after_shutdown,
]


@pytest.mark.parametrize("check", ANYWHERE, ids=lambda check: check.__name__)
def test_group(world: World, check) -> None:
    world.run(check)


@pytest.mark.worlds(sizes=(2, 3, 4))
@pytest.mark.parametrize("check", SEVERAL_RANKS, ids=lambda check: check.__name__)
def test_subgroup(world: World, check) -> None:
    world.run(check)


@pytest.mark.worlds(sizes=(4,))
@pytest.mark.parametrize("check", [subgroups_partition_the_world, meshes_nest_groups], ids=lambda check: check.__name__)
def test_partition(world: World, check) -> None:
    world.run(check)


@pytest.mark.worlds(sizes=(1, 3))
@pytest.mark.parametrize("check", LIVES, ids=lambda check: check.__name__)
def test_life_of_a_group(world: World, check) -> None:
    world.run(check, join=False)


@pytest.mark.worlds(sizes=(2, 3))
def test_destroying_with_pending_work_returns(fresh_world: World) -> None:
    fresh_world.run(destroying_with_pending_work_returns, join=False)


@pytest.mark.worlds(sizes=(2,))
def test_new_timeouts_apply(fresh_world: World) -> None:
    fresh_world.run(new_timeouts_apply)
