"""Context parallelism: each rank holds a part of every sequence, and attention gathers all keys and values.

torchrun --nproc-per-node 2 examples/strategies/cp.py

It follows Llama 3 (arXiv:2407.21783, section 3.3.2): a sequence is cut into twice as many parts as there are ranks.
Each rank takes one part from the beginning and one from the end, so that the causal mask leaves all equal work.
PyTorch's own `context_parallel` only replaces attention kernels of GPUs.
"""

import functools
from typing import Any

import tiny
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def places_of(rank: int, size: int) -> Tensor:
    """The positions of the tokens that a rank holds."""
    parts = torch.arange(tiny.LENGTH).chunk(2 * size)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]])


class Gather(torch.autograd.Function):
    """The parts of all ranks in order along dimension 2. Backward, each rank gets the gradients of its part."""

    @staticmethod
    def forward(context: Any, part: Tensor) -> Tensor:
        parts = part.new_empty(dist.get_world_size() * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(parts, part.contiguous())
        return torch.cat(parts.chunk(dist.get_world_size()), dim=2)

    @staticmethod
    def backward(context: Any, gradients: Tensor) -> Tensor:
        parts = gradients.chunk(dist.get_world_size(), dim=2)
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(own, torch.cat(parts))
        return own


def mix(seen: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of this rank's queries to all ranks' keys, where `seen`."""
    return F.scaled_dot_product_attention(query, Gather.apply(key), Gather.apply(value), attn_mask=seen)


def main() -> tiny.Result:
    size = dist.get_world_size()
    everyone = torch.cat([places_of(rank, size) for rank in range(size)]).to(tiny.device)
    places = places_of(dist.get_rank(), size).to(tiny.device)
    model = tiny.Transformer()
    for layer in model.layers:
        layer.attention.mix = functools.partial(mix, places[:, None] >= everyone)

    optimizer = tiny.descent(model.parameters())
    losses = []
    for step in range(tiny.STEPS):
        tokens, targets = tiny.batch(step)
        loss = tiny.loss(model(tokens[:, places]), targets[:, places])
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = tiny.mean(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(tiny.mean(loss))
    return tiny.learned(losses), {"losses": torch.stack(losses), **model.state_dict()}


if __name__ == "__main__":
    tiny.run(main)
