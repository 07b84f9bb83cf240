"""The model, its data, and where its weights lie: in shards at the trainers, whole at those who infer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HEADS, LENGTH, SEQUENCES = 64, 4, 32, 4


@dataclass(frozen=True)
class Shape:
    """The size of the model."""

    layers: int = 2
    width: int = 128


class Layer(nn.Module):
    """Causal self-attention and a feed-forward network, each with a norm before it and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.project_in, self.project_out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project_in(self.attention_norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        x = x + self.project_out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class Network(nn.Module):
    """A decoder."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.layers = nn.ModuleList(Layer(shape.width) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch(step: int, share: int) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards, and the same sequences one token later, int64 of shape [SEQUENCES, LENGTH]."""
    generator = torch.Generator().manual_seed(1000 * step + share)
    starts, strides = torch.randint(1, VOCABULARY, (2, SEQUENCES, 1), generator=generator)
    tokens = (starts + strides % 3 * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Span:
    """A run of elements: where it begins among one trainer's shards, where in the whole model, and its length."""

    at_trainer: int
    in_model: int
    count: int


class Layout:
    """Where each weight lies in the whole model, which is one run of float32, and which part each trainer has.

    FSDP2 cuts each weight along its first dimension, as `torch.chunk` does. A shard is thus a run of the weight.

    Args:
        shape: the size of the model.
        trainers: how many trainers share it.
    """

    def __init__(self, shape: Shape, trainers: int) -> None:
        self.shape, self.trainers = shape, trainers
        with torch.device("meta"):
            weights = dict(Network(shape).named_parameters())
        self._places: dict[str, tuple[int, torch.Size]] = {}
        self._spans: list[list[Span]] = [[] for _ in range(trainers)]
        self.elements = 0
        self._counts = [0] * trainers
        for name, weight in weights.items():
            self._places[name] = (self.elements, weight.shape)
            rows, each = weight.shape[0], weight.numel() // weight.shape[0]
            share = -(-rows // trainers)
            for trainer in range(trainers):
                first, last = (min(n * share, rows) for n in (trainer, trainer + 1))
                count = (last - first) * each
                self._spans[trainer].append(Span(self._counts[trainer], self.elements + first * each, count))
                self._counts[trainer] += count
            self.elements += weight.numel()

    def spans(self, trainer: int) -> list[Span]:
        """The trainer's shards, in the order of the model's weights."""
        return self._spans[trainer]

    def count(self, trainer: int) -> int:
        """How many elements the trainer has."""
        return self._counts[trainer]

    def stage(self, shards: Iterator[Tensor], trainer: int, into: Tensor) -> None:
        """Copies the trainer's shards, so that training goes on while they travel.

        Args:
            shards: one of each weight, float32.
            trainer: whose they are.
            into: float32 of shape [count(trainer)].

        Raises:
            ValueError: the shards are cut in another way.
        """
        for shard, span in zip(shards, self.spans(trainer), strict=True):
            if shard.numel() != span.count:
                raise ValueError(f"expected a shard of {span.count} elements, got {shard.numel()}")
            into[span.at_trainer : span.at_trainer + span.count] = shard.flatten()

    def network(self, whole: Tensor) -> Network:
        """A model whose weights are parts of `whole`, float32 of shape [elements]: to write there changes the model."""
        with torch.device("meta"):
            network = Network(self.shape)
        views = {name: whole[at : at + size.numel()].view(size) for name, (at, size) in self._places.items()}
        network.load_state_dict(views, assign=True)
        return network.requires_grad_(False)

    def checksum_of_staged(self, staged: Tensor) -> int:
        """The checksum of what a trainer sends."""
        return zlib.crc32(staged.numpy())

    def checksum_in_model(self, whole: Tensor, trainer: int) -> int:
        """The same of what has come of a trainer."""
        checksum = 0
        for span in self.spans(trainer):
            checksum = zlib.crc32(whole[span.in_model : span.in_model + span.count].numpy(), checksum)
        return checksum
