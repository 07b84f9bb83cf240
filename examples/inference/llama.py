"""A decoder shaped like Llama, with random weights in bfloat16, and two ways of cutting it over a group's ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# Adds up a tensor over all ranks, in place.
Reduce = Callable[[Tensor], object]


@dataclass(frozen=True)
class Shape:
    """The size of the model.

    Attributes:
        layers: how many layers there are.
        width: the features of a token.
        heads: how many heads ask.
        kv_heads: how many keys and values they share. The ranks must be a divisor of it.
        hidden: the features inside a feed-forward network.
        vocabulary: how many tokens there are.
    """

    layers: int = 4
    width: int = 1024
    heads: int = 16
    kv_heads: int = 8
    hidden: int = 2816
    vocabulary: int = 4096


def no_reduction(tensor: Tensor) -> None:
    """For a model that one rank has as a whole, or that PyTorch's plans add up."""


class Attention(nn.Module):
    """Attention with grouped queries, rotary positions and a cache. Heads follow from the projections' outputs."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.each = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key, self.value = (nn.Linear(shape.width, shape.kv_heads * self.each, bias=False) for _ in range(2))
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.reduce: Reduce = no_reduction
        self.keys = self.values = torch.empty(0)

    def forward(self, x: Tensor, rotation: Tensor, position: int) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.each)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        end = position + x.shape[1]
        self.keys[:, :, position:end] = rotate(key, rotation[:, position:end])
        self.values[:, :, position:end] = value
        mixed = F.scaled_dot_product_attention(
            rotate(query, rotation[:, position:end]),
            self.keys[:, :, :end],
            self.values[:, :, :end],
            is_causal=position == 0,
            enable_gqa=True,
        )
        out = self.out(mixed.transpose(1, 2).flatten(2))
        self.reduce(out)
        return out


class FeedForward(nn.Module):
    """A gated feed-forward network (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        self.reduce: Reduce = no_reduction

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(F.silu(self.gate(x)) * self.up(x))
        self.reduce(out)
        return out


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a norm before it and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(shape.width), Attention(shape)
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(shape.width), FeedForward(shape)

    def forward(self, x: Tensor, rotation: Tensor, position: int) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, position)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """The decoder, with the same random weights on every rank until it is cut."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.to(torch.bfloat16).requires_grad_(False)
        self.rotation = torch.empty(0)

    def begin(self, batch: int, length: int, ranks: int) -> None:
        """Makes the caches empty.

        Args:
            batch: how many sequences there are.
            length: the most tokens of one.
            ranks: over how many ranks the model is cut.
        """
        each = self.shape.width // self.shape.heads
        frequencies = 10_000.0 ** (-torch.arange(0, each, 2) / each)
        angles = torch.outer(torch.arange(length), frequencies)
        self.rotation = torch.stack((angles.cos(), angles.sin())).to(torch.bfloat16)
        for layer in self.layers:
            size = (batch, self.shape.kv_heads // ranks, length, each)
            layer.attention.keys, layer.attention.values = (torch.zeros(size, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, tokens: Tensor, position: int) -> Tensor:
        """The most likely next tokens.

        Args:
            tokens: int64 of shape [batch, tokens].
            position: the place of the first ones in their sequences.

        Returns:
            int64 of shape [batch, 1].
        """
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotation, position)
        return self.head(self.norm(x[:, -1:])).argmax(-1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns each pair of features by the angle of its position (Su et al., RoFormer, 2021)."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def cut_by_plan(model: Llama, mesh: DeviceMesh) -> None:
    """Cuts heads and hidden features by PyTorch's plans, which add up what attention and feed-forward networks make."""
    for layer in model.layers:
        columns = ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up")
        rows = ("attention.out", "feed_forward.down")
        plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(layer, mesh, plan)


def cut_by_hand(model: Llama, rank: int, ranks: int, reduce: Reduce) -> None:
    """Cuts the same by hand, as inference engines do.

    Args:
        model: the whole model.
        rank: this rank.
        ranks: how many there are.
        reduce: adds up what leaves attention and feed-forward network.
    """
    for layer in model.layers:
        attention, feed_forward = layer.attention, layer.feed_forward
        for linear in (attention.query, attention.key, attention.value, feed_forward.gate, feed_forward.up):
            linear.weight = part(linear.weight, rank, ranks, 0)
        for linear in (attention.out, feed_forward.down):
            linear.weight = part(linear.weight, rank, ranks, 1)
        attention.reduce = feed_forward.reduce = reduce


def part(weight: Tensor, rank: int, ranks: int, dim: int) -> nn.Parameter:
    """This rank's part of a weight."""
    return nn.Parameter(weight.chunk(ranks, dim)[rank].contiguous(), requires_grad=False)
