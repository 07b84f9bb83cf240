"""Splits of the communicators of a vendor's library, the fake one, which counts unique ids and splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from conftest import begin, variables
from harness import World, fresh_store
from ncclx_rs import device_mesh
from test_cuda_nccl import called, launched

RANKS = 4


@pytest.fixture(scope="module")
def four_devices() -> Iterator[World]:
    """Four ranks with a device each."""
    others = {"SOFTCUDA_DELAY_US": "100", "SOFTCUDA_WEAK": "1"}
    world = World(RANKS, "shm", variables(RANKS, "nccl", **others), begin)
    yield world
    world.close()


class Calls:
    """What this process has called of the library since it was made."""

    def __init__(self) -> None:
        """Begins to count."""
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[int, int]:
        return called("ids"), called("splits")

    def ids_and_splits(self) -> tuple[int, int]:
        ids, splits = self._now()
        return ids - self._before[0], splits - self._before[1]


def place() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def new_comm(name: str, rank: int, size: int, hints: Mapping[str, str] | None = None) -> ncclx_rs.TorchComm:
    made = {"store": fresh_store(), "rank": rank, "size": size}
    return ncclx_rs.new_comm(name, place(), f"world of {name}", hints=dict(hints or {}), **made)


def works(comm: ncclx_rs.TorchComm) -> None:
    """Everyone's number comes to everyone, in the order of the ranks."""
    own, all_of_them = torch.full((3,), comm.rank, device="cuda"), torch.empty(3 * comm.size, device="cuda").int()
    assert launched(lambda: comm.all_gather_single(all_of_them, own.int(), False)) == 1, "the library did it"
    assert all_of_them.tolist() == [rank for rank in range(comm.size) for _ in range(3)]


def by_objects(rank: int, size: int, name: str, hints: Mapping[str, str]) -> None:
    comm = new_comm(name, rank, size, hints)
    works(comm)
    calls = Calls()
    # In another order, in none, and alone.
    child = comm.split([[3, 0, 2]])
    assert (child is None) == (rank == 1)
    alone = comm.split([rank])
    assert alone is not None
    works(alone)
    works(comm)
    grandchild = None
    if child is not None:
        assert child.rank == {3: 0, 0: 1, 2: 2}[rank]
        works(child)
        grandchild = child.split([2, 1] if child.rank else [])
        if grandchild is not None:
            assert grandchild.rank == {0: 1, 2: 0}[rank]
            works(grandchild)
    assert calls.ids_and_splits() == (0, 2 if child is None else 3)
    # The ends come in the order of their making.
    for made in (comm, child, alone):
        if made is not None:
            made.finalize()
    if grandchild is not None:
        works(grandchild)
        grandchild.finalize()


@pytest.mark.parametrize(
    "name, hints",
    [("nccl", {}), ("nccl-lazy", {}), ("nccl", {"splitShare": "1"}), ("ncclx", {"nccl_config": "splitShare=0"})],
    ids=["nccl", "nccl-lazy", "shared", "ncclx"],
)
def test_communicators_are_split_with_their_librarys(four_devices: World, name: str, hints: dict[str, str]) -> None:
    four_devices.run(by_objects, name, hints, join=False)


def with_other_settings(rank: int, size: int) -> None:
    comm = new_comm("nccl", rank, size)
    calls = Calls()
    child = comm.split([[1, 0], [2, 3]], hints={"maxCTAs": "8"})
    assert child is not None
    works(child)
    assert calls.ids_and_splits() == (int(child.rank == 0), 1), "what was split is not what is wanted"
    works(comm)
    child.finalize()
    comm.finalize()


def test_a_part_with_other_settings_begins_by_itself(four_devices: World) -> None:
    four_devices.run(with_other_settings, join=False)


def mesh_of_communicators(rank: int, size: int) -> None:
    comm = new_comm("nccl", rank, size)
    calls = Calls()
    mesh = device_mesh.build(comm, {"dp": 2, "tp": 2})
    for dimension in ("dp", "tp"):
        tensor = torch.full((5,), float(rank), device="cuda")
        dist.all_reduce(tensor, group=mesh[dimension].get_group())
        assert tensor.tolist() == [float(rank + (rank ^ (2 if dimension == "dp" else 1)))] * 5
    assert calls.ids_and_splits() == (0, 2)
    works(comm)
    device_mesh.close(mesh)
    comm.finalize()


def test_meshes_of_communicators_split_it(four_devices: World) -> None:
    four_devices.run(mesh_of_communicators, join=False)


def summed(rank: int, group: Any, expected: float) -> None:
    tensor = torch.full((5,), float(rank), device="cuda")
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [expected] * 5


def split_groups(rank: int, size: int, is_bound: bool) -> None:
    device = {"device_id": place()} if is_bound else {}
    dist.init_process_group("ncclx_rs", store=fresh_store(), rank=rank, world_size=size, **device)
    try:
        calls = Calls()
        # Of a group that has not begun, each part begins by itself.
        halves = dist.split_group(split_ranks=[[0, 1], [2, 3]])
        summed(rank, halves, 1.0 if rank < 2 else 5.0)
        ids, splits = calls.ids_and_splits()
        assert ids == (0 if is_bound else int(rank % 2 == 0))
        assert (splits > 0) == is_bound
        summed(rank, None, 6.0)
        # Now all have begun. Some are in no group.
        calls = Calls()
        outer = dist.split_group(split_ranks=[[0, 3]])
        if rank in (0, 3):
            summed(rank, outer, 3.0)
        else:
            assert outer is dist.GroupMember.NON_GROUP_MEMBER
        inner = dist.split_group(split_ranks=[[0], [1, 2, 3]])
        summed(rank, inner, 6.0 if rank else 0.0)
        ids, splits = calls.ids_and_splits()
        assert ids == 0 and splits >= 2
        # Members alone call for these, in part.
        calls = Calls()
        pair = dist.new_group([1, 2])
        if rank in (1, 2):
            summed(rank, pair, 3.0)
        ids, splits = calls.ids_and_splits()
        assert (ids, splits) == (int(rank == 1), 0)
        summed(rank, None, 6.0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("is_bound", [True, False], ids=["bound", "lazy"])
def test_split_group_splits_the_librarys_communicator(four_devices: World, is_bound: bool) -> None:
    four_devices.run(split_groups, is_bound, join=False)


def missing(rank: int, size: int) -> None:
    comm = new_comm("nccl", rank, size, {"timeout_seconds": "8"})
    store = fresh_store()
    calls = Calls()
    if rank == 2:
        store.wait([f"failed{other}" for other in (0, 1, 3)], timedelta(seconds=60))
    with pytest.raises(RuntimeError, match=r"rank 2 did not call it; all ranks of a communicator that NCCL"):
        comm.split([[0, 1, 2, 3]])
    store.set(f"failed{rank}", "yes")
    store.wait([f"failed{other}" for other in range(size)], timedelta(seconds=60))
    assert calls.ids_and_splits() == (0, 0)
    child = comm.split([[1, 2], [0, 3]])
    assert child is not None
    works(child)
    works(comm)
    assert calls.ids_and_splits() == (0, 1)
    child.finalize()
    comm.finalize()


def test_a_rank_that_does_not_split_is_named(four_devices: World) -> None:
    four_devices.run(missing, join=False)
