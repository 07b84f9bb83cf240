"""Fully sharded data parallelism (FSDP2), with mixed precision and gradient accumulation.

torchrun --nproc-per-node 2 examples/strategies/fsdp2.py

Every parameter is cut over all ranks. It is gathered and used in bfloat16; gradients are added in float32, once for
every two batches.
"""

import tiny
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> tiny.Result:
    mesh = init_device_mesh(tiny.device.type, (dist.get_world_size(),))
    model = tiny.Transformer()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)

    optimizer = tiny.descent(model.parameters())
    losses = []
    for step in range(tiny.STEPS):
        for half in range(2):
            model.set_requires_gradient_sync(half == 1)
            tokens, targets = tiny.batch(2 * step + half, dist.get_rank())
            loss = tiny.loss(model(tokens), targets)
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(tiny.mean(loss))

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return tiny.learned(losses), {"losses": torch.stack(losses), **whole}


if __name__ == "__main__":
    tiny.run(main)
