"""CUDA tensors through memory of the host (engine=host), and by a library where ranks are alike (engine=mixed).

Other ranks have tensors on the CPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from conftest import begin
from harness import World, fresh_store
from reference import assert_same
from test_cuda_collectives import everything
from test_cuda_training import data_parallel, sharded
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture(scope="module")
def staged() -> Iterator[World]:
    """Three ranks on two devices."""
    variables = {"SOFTCUDA_DEVICES": "2", "SOFTCUDA_DELAY_US": "200", "SOFTCUDA_WEAK": "1", "NCCLX_RS_ENGINE": "host"}
    world = World(3, "shm", variables, begin)
    yield world
    world.close()


@pytest.fixture(scope="module")
def alike() -> Iterator[World]:
    """As before, but the ranks that have a library together use it."""
    variables = {"SOFTCUDA_DEVICES": "3", "SOFTCUDA_DELAY_US": "200", "SOFTCUDA_WEAK": "1", "NCCLX_RS_ENGINE": "mixed"}
    world = World(3, "shm", variables, begin)
    yield world
    world.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
def test_every_collective_is_right(staged: World, is_async: bool) -> None:
    staged.run(everything, is_async)


def test_ddp_and_fsdp2_train_as_on_the_cpu(staged: World) -> None:
    staged.run(data_parallel)
    staged.run(sharded)


def placed(rank: int, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where this rank computes: all but the last one on a device."""
    return tensor if rank == dist.get_world_size() - 1 else tensor.cuda()


def mixed(rank: int, size: int) -> None:
    tensor = placed(rank, torch.arange(1000.0) * (rank + 1))
    dist.all_reduce(tensor)
    assert_same(tensor.cpu(), torch.arange(1000.0) * 6, "the sum of all")
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert_same(tensor.cpu(), torch.arange(1000.0) * 18, "the sum of sums")
    out = placed(rank, torch.zeros(3 * size))
    dist.all_gather_into_tensor(out, placed(rank, torch.full((3,), float(rank))))
    assert_same(out.cpu(), torch.arange(3.0).repeat_interleave(3), "what all have")
    # Round and round, in a batch.
    sent, received = placed(rank, torch.full((10,), float(rank))), placed(rank, torch.zeros(10))
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert_same(received.cpu(), torch.full((10,), float((rank - 1) % size)), "the neighbour's")


def test_ranks_on_devices_and_on_the_cpu_are_one_group(staged: World) -> None:
    staged.run(mixed)


def trained(rank: int, size: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    data_parallel = DistributedDataParallel(net.to(placed(rank, torch.zeros(1)).device))
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        loss = data_parallel(placed(rank, torch.randn(4, 8))).square().mean()
        loss.backward()
    norms = [placed(rank, torch.zeros(1)) for _ in range(size)]
    own = torch.stack([parameter.grad.norm() for parameter in net.parameters() if parameter.grad is not None]).sum()
    dist.all_gather(norms, own.reshape(1))
    torch.testing.assert_close(norms[0].cpu(), norms[-1].cpu())
    assert norms[0].item() > 0


def test_ddp_trains_with_a_rank_on_the_cpu(staged: World) -> None:
    staged.run(trained)


def by_object(rank: int, size: int, engine: str) -> None:
    device = placed(rank, torch.zeros(1)).device
    store = fresh_store()
    comm = ncclx_rs.new_comm("ncclx", device, name="mixed", store=store, rank=rank, size=size, hints={"engine": engine})
    tensor = placed(rank, torch.ones(5000))
    comm.all_reduce(tensor)
    assert_same(tensor.cpu(), torch.full((5000,), 3.0), "the sum of ones")
    if device.type == "cuda":
        with pytest.raises(ValueError, match="nothing in a CUDA graph can"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            comm.all_reduce(tensor)
    comm.barrier()
    comm.finalize()


@pytest.mark.parametrize("engine", ["host", "mixed"])
def test_a_communicator_of_the_object_api_joins_them(alike: World, engine: str) -> None:
    alike.run(by_object, engine)


def members_change(rank: int, size: int) -> None:
    device = placed(rank, torch.zeros(1)).device
    store = fresh_store()
    comm = ncclx_rs.new_comm("ncclx", device, "elastic", enable_reconfigure=True, hints={"engine": "mixed"})
    store.set(f"handle{rank}", comm.get_init_handle())
    handles = [store.get(f"handle{r}").decode() for r in range(size)]
    for uuid, members in enumerate([[0, 1, 2], [2, 0, 1], [1, 2], [0, 1, 2]]):
        if rank not in members:
            continue
        comm.reconfigure(uuid, [handles[r] for r in members]).wait()
        before = groups_of_calls()
        tensor = placed(rank, torch.full((5000,), rank + 1.0))
        comm.all_reduce(tensor)
        expected = torch.full((5000,), sum(r + 1.0 for r in members))
        assert_same(tensor.cpu(), expected, f"the sum of members {members}")
        assert (groups_of_calls() > before) == (rank < 2 and 0 in members)
    comm.finalize()


def test_members_that_change_find_out_again_who_is_alike(alike: World) -> None:
    alike.run(members_change)


def groups_of_calls() -> int:
    """How often this process has called its library."""
    count = ctypes.CDLL(os.environ["NCCLX_RS_NCCL_LIBRARY"]).fakenccl_count
    count.restype = ctypes.c_ulong
    return int(count(b"groups"))


def by_library(rank: int, size: int) -> None:
    """What is long goes by the library of the two ranks that are alike."""
    before = groups_of_calls()
    for dtype in [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64]:
        for op, expected in [(dist.ReduceOp.SUM, 6), (dist.ReduceOp.MAX, 3), (dist.ReduceOp.MIN, 1)]:
            tensor = placed(rank, torch.full((20_001,), rank + 1, dtype=dtype))
            dist.all_reduce(tensor, op)
            assert_same(tensor.cpu(), torch.full((20_001,), expected, dtype=dtype), f"{op} of {dtype}")
    for op, expected in [(dist.ReduceOp.AVG, 3.0), (dist._make_nccl_premul_sum(0.5), 4.5)]:
        # Not the average of those of the groups, which would be 3.5.
        tensor = placed(rank, torch.tensor([1.0, 3.0, 5.0])[rank].repeat(10_000))
        dist.all_reduce(tensor, op)
        torch.testing.assert_close(tensor.cpu(), torch.full((10_000,), expected))
    for root in range(size):
        tensor = placed(rank, torch.arange(10_000.0) + rank)
        dist.broadcast(tensor, root)
        assert_same(tensor.cpu(), torch.arange(10_000.0) + root, f"what rank {root} has")
    assert (groups_of_calls() > before) == (rank < size - 1)
    # What the library has not.
    before = groups_of_calls()
    for dtype, op, expected in [
        (torch.int64, dist.ReduceOp.BAND, 0),
        (torch.int32, dist.ReduceOp.AVG, 2),
    ]:
        tensor = placed(rank, torch.full((20_001,), rank + 1.0).to(dtype))
        dist.all_reduce(tensor, op)
        assert_same(tensor.cpu(), torch.full((20_001,), float(expected)).to(dtype), f"{op} of {dtype}")
    assert groups_of_calls() == before


def test_a_library_serves_ranks_that_are_alike_beside_one_on_the_cpu(alike: World) -> None:
    alike.run(by_library)


def trained_longer(rank: int, size: int) -> None:
    """With gradients that are long enough for a library."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    data_parallel = DistributedDataParallel(net.to(placed(rank, torch.zeros(1)).device))
    torch.manual_seed(rank)
    data_parallel(placed(rank, torch.randn(4, 64))).square().mean().backward()
    mine = torch.cat([parameter.grad.cpu().flatten() for parameter in net.parameters() if parameter.grad is not None])
    # The same by hand.
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    for other in range(size):
        torch.manual_seed(other)
        (alone(torch.randn(4, 64)).square().mean() / size).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in alone.parameters() if parameter.grad is not None])
    torch.testing.assert_close(mine, expected)


def test_ddp_trains_by_a_library_with_a_rank_on_the_cpu(alike: World) -> None:
    alike.run(trained_longer)
    alike.run(trained)
