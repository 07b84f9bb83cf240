"""CUDA tensors through memory of the host (engine=host), in worlds where other ranks have tensors on the CPU."""

from __future__ import annotations

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


def by_object(rank: int, size: int) -> None:
    device = placed(rank, torch.zeros(1)).device
    store = fresh_store()
    comm = ncclx_rs.new_comm("ncclx", device, name="mixed", store=store, rank=rank, size=size, hints={"engine": "host"})
    tensor = placed(rank, torch.ones(5))
    comm.all_reduce(tensor)
    assert_same(tensor.cpu(), torch.full((5,), 3.0), "the sum of ones")
    if device.type == "cuda":
        with pytest.raises(ValueError, match="nothing in a CUDA graph can"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            comm.all_reduce(tensor)
    comm.barrier()
    comm.finalize()


def test_a_communicator_of_the_object_api_joins_them(staged: World) -> None:
    staged.run(by_object)
