"""Meshes over communicators: their groups, the groups that PyTorch derives, and models trained on them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import World, descriptors, fresh_store
from ncclx_rs import TorchComm, device_mesh
from reference import assert_same, data, reduced
from test_frameworks import assert_parameters_close, model, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@contextmanager
def communicator(rank: int, size: int) -> Iterator[TorchComm]:
    comm = ncclx_rs.new_comm("ncclx", "cpu", "world", store=fresh_store(), rank=rank, size=size)
    try:
        yield comm
    finally:
        comm.finalize()


def assert_reduces(group: dist.ProcessGroup, members: list[int]) -> None:
    assert dist.get_process_group_ranks(group) == members
    tensor = data(dist.get_rank(), 50)
    dist.all_reduce(tensor, group=group)
    assert_same(tensor, reduced([data(r, 50) for r in members]), f"members {members}")


def every_dimension_has_its_groups(rank: int, size: int) -> None:
    half = size // 2
    with communicator(rank, size) as comm:
        mesh = device_mesh.build(comm, {"dp": 2, "tp": half})
        assert mesh.mesh.tolist() == [list(range(half)), list(range(half, size))]
        assert mesh.mesh_dim_names == ("dp", "tp") and mesh.get_rank() == rank
        assert_reduces(mesh["tp"].get_group(), [r for r in range(size) if r // half == rank // half])
        assert_reduces(mesh["dp"].get_group(), [r for r in range(size) if r % half == rank % half])
        assert_reduces(mesh["dp", "tp"]._flatten("both").get_group(), list(range(size)))
        device_mesh.close(mesh)
        device_mesh.close(mesh)
        assert not dist.is_initialized()


def meshes_of_one_shape_follow_each_other(rank: int, size: int) -> None:
    """DTensor caches results of operations on an equal mesh, whose groups no longer exist."""
    with communicator(rank, size) as comm:
        for _ in range(2):
            mesh = device_mesh.build(comm, {"dp": 2, "tp": size // 2})
            part = DTensor.from_local(torch.ones(3), mesh["dp"], [Partial()])
            assert_same((part + part).full_tensor(), torch.full((3,), 4.0), "the sum over dp")
            device_mesh.close(mesh)


def equal_meshes_have_their_own_groups(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        first, second = (device_mesh.build(comm, {"dp": size}) for _ in range(2))
        assert first == second
        device_mesh.close(first)
        del first
        gc.collect()
        assert_reduces(second.get_group(), list(range(size)))
        device_mesh.close(second)
        assert not dist.is_initialized()


def ranks_are_placed_by_host(rank: int, size: int) -> None:
    """In this mode ranks 0 and 1, and ranks 2 and 3, share a host."""
    with communicator(rank, size) as comm:
        for innermost, expected in (("tp", [[0, 1], [2, 3]]), ("dp", [[0, 2], [1, 3]])):
            mesh = device_mesh.build(comm, {"dp": 2, "tp": 2}, innermost=innermost)
            assert mesh.mesh.tolist() == expected
            assert_reduces(mesh[innermost].get_group(), [rank // 2 * 2, rank // 2 * 2 + 1])
            device_mesh.close(mesh)


def wrong_meshes_are_refused(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        for dimensions, options, text in (
            ({"dp": 2, "tp": size}, {}, f"the dimensions dp=2, tp={size} make {2 * size} ranks, but there are {size}"),
            ({"dp": 0}, {}, "dimension `dp` has size 0"),
            ({"dp": size}, {"innermost": "tp"}, "there is no dimension `tp` among dp"),
        ):
            with pytest.raises(ValueError, match=text):
                device_mesh.build(comm, dimensions, **options)
        with pytest.raises(RuntimeError, match="global comm"):
            device_mesh.init_device_mesh((comm, comm), ("a", "b"))
        with pytest.raises(ValueError, match="different names"):
            device_mesh.init_device_mesh((comm, comm), ("a", "a"), comm)
        with pytest.raises(RuntimeError, match="ranks, the world has"):
            device_mesh.init_device_mesh((comm, comm), ("a", "b"), comm if size > 1 else comm.split([0], "one"))


def meshes_take_communicators_that_exist(rank: int, size: int) -> None:
    half = size // 2
    with communicator(rank, size) as comm:
        rows = [[half * i + j for j in range(half)] for i in range(2)]
        tp = comm.split(rows, "tp")
        dp = comm.split([list(column) for column in zip(*rows, strict=True)], "dp")
        assert tp is not None and dp is not None
        mesh = device_mesh.init_device_mesh((dp, tp), ("dp", "tp"), _global_comm=comm)
        assert mesh["tp"].get_group().group_name == "tp"
        assert_reduces(mesh["tp"].get_group(), rows[rank // half])
        assert_reduces(mesh["dp"].get_group(), [row[rank % half] for row in rows])
        dist.destroy_process_group()
        tp.finalize()
        dp.finalize()


def the_communicator_outlives_its_meshes(rank: int, size: int) -> None:
    def assert_usable() -> None:
        tensor = data(rank, 50)
        comm.all_reduce(tensor)
        assert_same(tensor, reduced([data(r, 50) for r in range(size)]), "the communicator without a mesh")

    with communicator(rank, size) as comm:
        for ends in (device_mesh.close, lambda mesh: None, lambda mesh: dist.destroy_process_group()):
            mesh = device_mesh.build(comm, {"dp": size})
            assert_reduces(dist.group.WORLD, list(range(size)))
            assert_reduces(mesh.get_group(), list(range(size)))
            ends(mesh)
            del mesh
            gc.collect()
            assert not dist.is_initialized()
            assert_usable()


def models_train_on_a_mesh(rank: int, size: int) -> None:
    with communicator(rank, size) as comm:
        mesh = device_mesh.build(comm, {"dp": size})
        net = model()
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        train(net, rank, size)
        full = {name: p.full_tensor() for name, p in net.named_parameters() if isinstance(p, DTensor)}
        assert_parameters_close(full, size, "FSDP2")
        net = nn.parallel.DistributedDataParallel(model(), process_group=mesh.get_group())
        train(net, rank, size)
        assert_parameters_close(dict(net.module.named_parameters()), size, "DDP")
        inputs = data(0, (5, 12))
        expected = model()(inputs)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        torch.testing.assert_close(parallelize_module(model(), mesh, plan)(inputs), expected)
        whole = data(0, (size * 3, 2 * size))
        for placement in (Replicate(), Shard(0), Shard(1)):
            moved = DTensor.from_local(whole, mesh, [Replicate()]).redistribute(mesh, [placement])
            assert_same(moved.full_tensor(), whole, f"DTensor {placement}")
        device_mesh.close(mesh)


def groups_are_freed(rank: int, size: int) -> None:
    counts = []
    with communicator(rank, size) as comm:
        for turn in range(12):
            mesh = device_mesh.build(comm, {"dp": 2, "tp": size // 2})
            assert_reduces(mesh["tp"].get_group(), [r for r in range(size) if r // (size // 2) == rank // (size // 2)])
            if turn % 2:
                device_mesh.close(mesh)
            del mesh
            assert not dist.is_initialized()
            counts.append(descriptors())
    assert descriptors(counts[2] + 4) <= counts[2] + 4, counts


@pytest.mark.worlds(sizes=(4,), modes=("shm", "tcp", "hier"))
def test_every_dimension_has_its_groups(world: World) -> None:
    world.run(every_dimension_has_its_groups, join=False)


@pytest.mark.worlds(sizes=(4,), modes=("shm",))
def test_meshes_of_one_shape_follow_each_other(world: World) -> None:
    world.run(meshes_of_one_shape_follow_each_other, join=False)


@pytest.mark.worlds(sizes=(4,), modes=("hier",))
def test_ranks_are_placed_by_host(world: World) -> None:
    world.run(ranks_are_placed_by_host, join=False)


@pytest.mark.worlds(sizes=(2, 4), modes=("shm",))
@pytest.mark.parametrize(
    "check",
    [
        equal_meshes_have_their_own_groups,
        the_communicator_outlives_its_meshes,
        wrong_meshes_are_refused,
        meshes_take_communicators_that_exist,
        models_train_on_a_mesh,
        groups_are_freed,
    ],
    ids=lambda check: check.__name__,
)
def test_mesh(world: World, check) -> None:
    world.run(check, join=False)
