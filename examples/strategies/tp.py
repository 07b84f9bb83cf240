"""Tensor parallelism with sequence parallelism: every layer is cut over all ranks.

torchrun --nproc-per-node 2 examples/strategies/tp.py

Heads and hidden features are cut where matrices multiply, the sequence is cut everywhere else.
"""

import tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def cut(model: tiny.Transformer, mesh: DeviceMesh) -> None:
    """Cuts a transformer, or a pipeline's stage of one, along a mesh of one dimension."""
    whole_sequence = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": whole_sequence,
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": whole_sequence,
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    if model.embedding is not None:
        vocabulary = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(model, mesh, {"embedding": vocabulary})
    if model.head is not None:
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, {"norm": SequenceParallel(), "head": head})


def main() -> tiny.Result:
    model = tiny.Transformer()
    cut(model, init_device_mesh(tiny.device.type, (dist.get_world_size(),)))
    optimizer = tiny.descent(model.parameters())
    losses = []
    for step in range(tiny.STEPS):
        tokens, targets = tiny.batch(step)  # the same on all ranks
        loss = tiny.loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    return tiny.learned(losses), {"losses": torch.stack(losses), **whole}


if __name__ == "__main__":
    tiny.run(main)
