"""Hybrid sharding (HSDP): parameters are cut within groups of ranks, and the groups are replicas of each other.

torchrun --nproc-per-node 4 examples/strategies/hsdp.py

Gradients are reduce-scattered within a group, then all-reduced between groups.
"""

import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> tiny.Result:
    mesh = init_device_mesh(tiny.device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = tiny.Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = tiny.descent(model.parameters())
    losses = []
    for step in range(tiny.STEPS):
        tokens, targets = tiny.batch(step, dist.get_rank())
        loss = tiny.loss(model(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(tiny.mean(loss))

    whole = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    return tiny.learned(losses), {"losses": torch.stack(losses), **whole}


if __name__ == "__main__":
    tiny.run(main)
