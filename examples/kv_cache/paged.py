"""A cache of keys and values in pages, and a small decoder that works on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """The size of the model, and of a block of the cache in tokens."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    block: int = 16


class PagedCache:
    """Keys and values of many sequences, in blocks of some tokens each. A sequence has a table of blocks.

    Attributes:
        pages: bfloat16 of shape [layers, 2, blocks, block, heads, width / heads]; 2 stands for keys and values.

    Args:
        shape: the size of the model.
        blocks: how many blocks there are.
    """

    def __init__(self, shape: Shape, blocks: int) -> None:
        self.shape, each = shape, shape.width // shape.heads
        self.pages = torch.zeros(shape.layers, 2, blocks, shape.block, shape.heads, each, dtype=torch.bfloat16)
        self._free = list(range(blocks))

    def blocks_for(self, tokens: int) -> int:
        """How many blocks so many tokens need."""
        return -(-tokens // self.shape.block)

    def free(self) -> int:
        """How many blocks nobody has."""
        return len(self._free)

    def take(self, blocks: int) -> list[int]:
        """A table of that many blocks.

        Raises:
            RuntimeError: there are fewer.
        """
        if blocks > len(self._free):
            raise RuntimeError(f"expected {blocks} free blocks, got {len(self._free)}")
        taken, self._free = self._free[:blocks], self._free[blocks:]
        return taken

    def give_back(self, table: list[int]) -> None:
        """Ends a sequence. Its blocks go to others."""
        self._free += table

    def spans(self, table: list[int]) -> list[tuple[int, int]]:
        """Where a table's blocks lie: offset and length in bytes, for each layer its keys and its values."""
        length = self.pages[0, 0, 0].nbytes
        blocks = self.pages.shape[2]
        return [(length * (part * blocks + block), length) for part in range(2 * self.shape.layers) for block in table]

    def put(self, layer: int, table: list[int], position: int, keys: Tensor, values: Tensor) -> None:
        """Stores the keys and values of some tokens, bfloat16 of shape [tokens, heads, width / heads]."""
        places = torch.arange(position, position + keys.shape[0])
        blocks, inside = torch.tensor(table)[places // self.shape.block], places % self.shape.block
        self.pages[layer, 0, blocks, inside] = keys
        self.pages[layer, 1, blocks, inside] = values

    def get(self, layer: int, table: list[int], tokens: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a sequence's first tokens, bfloat16 of shape [tokens, heads, width / heads] each."""
        keys, values = self.pages[layer][:, table].flatten(1, 2)[:, :tokens]
        return keys, values


class Decoder(nn.Module):
    """A decoder with random weights in bfloat16, the same in every process."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shape, width = shape, shape.width
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.project_in = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(shape.layers))
        self.project_out = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(shape.layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.to(torch.bfloat16).requires_grad_(False)

    def forward(self, tokens: Tensor, position: int, cache: PagedCache, table: list[int]) -> int:
        """Takes a sequence's next tokens, and adds them to its cache.

        Args:
            tokens: int64 of shape [tokens].
            position: the place of the first one in the sequence.
            cache: has the sequence's tokens before that.
            table: its blocks.

        Returns:
            the most likely token behind them.
        """
        x, end = self.embedding(tokens), position + tokens.shape[0]
        angles = torch.arange(position, end)[:, None] / 100.0 ** torch.linspace(0, 1, self.shape.width)
        x = x + angles.sin().to(x.dtype)
        # A token sees those before it, and itself.
        sees = torch.arange(end)[None] <= torch.arange(position, end)[:, None]
        for layer, (project_in, project_out) in enumerate(zip(self.project_in, self.project_out, strict=True)):
            heads = project_in(F.rms_norm(x, x.shape[-1:])).unflatten(-1, (3 * self.shape.heads, -1))
            query, new_keys, new_values = heads.chunk(3, dim=1)
            cache.put(layer, table, position, new_keys, new_values)
            keys, values = cache.get(layer, table, end)
            turned = (part.transpose(0, 1) for part in (query, keys, values))
            mixed = F.scaled_dot_product_attention(*turned, attn_mask=sees)
            x = x + project_out(mixed.transpose(0, 1).flatten(1))
        return int(self.head(F.rms_norm(x[-1], x.shape[-1:])).argmax())


def generate(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    """The tokens behind a prompt, all made in this process."""
    cache = PagedCache(decoder.shape, PagedCache(decoder.shape, 0).blocks_for(len(prompt) + count))
    table = cache.take(cache.free())
    made = [decoder(torch.tensor(prompt), 0, cache, table)]
    while len(made) < count:
        made.append(decoder(torch.tensor(made[-1:]), len(prompt) + len(made) - 1, cache, table))
    return made
