"""Training on CUDA tensors, against the same program on the CPU."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from harness import World
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def steps(net: nn.Module, rank: int, device: torch.device) -> list[float]:
    """The losses of a few steps on this rank's own batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step in range(4):
        batch = torch.randn(16, 24, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def data_parallel(rank: int, size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    # Small buckets: several are in flight while the backward pass goes on.
    on_device = DistributedDataParallel(model().to(device), bucket_cap_mb=0.01)
    on_cpu = DistributedDataParallel(model(), bucket_cap_mb=0.01)
    got, expected = steps(on_device, rank, device), steps(on_cpu, rank, torch.device("cpu"))
    assert got == expected, (got, expected)


def test_ddp_with_overlap_trains_as_on_the_cpu(cuda_world: World) -> None:
    cuda_world.run(data_parallel)


def sharded(rank: int, size: int) -> None:
    losses = []
    for kind in ("cuda", "cpu"):
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        mesh = dist.init_device_mesh(kind, (size,))
        net = copy.deepcopy(model()).to(device)
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        losses.append(steps(net, rank, device))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)


def test_fsdp2_trains_as_on_the_cpu(cuda_world: World) -> None:
    cuda_world.run(sharded)
