"""A tiny transformer and its data, and the beginning and end of a run, for the examples of this folder."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 32, 8, 16
SEQUENCES, STEPS = 16, 8

# Where models and batches lie.
device = torch.device("cpu")

# A line for people, and the numbers by which two backends are compared.
Result = tuple[str, dict[str, Tensor]]


def use(kind: str) -> None:
    """Has models and batches lie on a device of that kind; several ranks may share one."""
    global device
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)


class Attention(nn.Module):
    """Causal self-attention. The number of heads follows from the projections' outputs, so that heads can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        return self.out(self.mix(query, key, value).transpose(1, 2).flatten(2))

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class FeedForward(nn.Module):
    """Two linear maps with a nonlinear one between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a norm before it and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.feed_forward_norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """A decoder with the same weights on every rank. A stage of a pipeline has `None` for the parts of other stages."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY)
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def stage(index: int, stages: int) -> Transformer:
    """Stage `index` of a transformer with one layer a stage."""
    whole = Transformer(stages)
    whole.layers = whole.layers[index : index + 1]
    if index > 0:
        whole.embedding = None
    if index < stages - 1:
        whole.norm = whole.head = None
    return whole


def batch(step: int, share: int = 0) -> tuple[Tensor, Tensor]:
    """Sequences that count upwards, and the same sequences one token later; they differ by step and share."""
    generator = torch.Generator().manual_seed(1000 * step + share)
    starts, strides = torch.randint(1, VOCABULARY, (2, SEQUENCES, 1), generator=generator)
    tokens = ((starts + strides % 3 * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def descent(parameters: object) -> torch.optim.Optimizer:
    """Plain gradient descent: other optimizers divide by gradients, which enlarges a difference in the last bit."""
    # Several parameters at a time, as by default on CUDA, PyTorch 2.11 takes gradients that are partial sums for sums.
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, foreach=False)  # type: ignore[arg-type]


def mean(value: Tensor) -> Tensor:
    """The mean of the ranks' values."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def learned(losses: list[Tensor]) -> str:
    """The last line of a training run."""
    return f"loss {losses[0].item():.4f} -> {losses[-1].item():.4f}"


@dataclass
class Report:
    """An example's report: its line, its numbers, and how often its backend served each operation."""

    line: str
    numbers: dict[str, Tensor]
    operations: dict[str, int]


def perform(main: Callable[[], Result], backend: str) -> Report:
    """Runs an example in the default process group, and makes sure that `backend` served all of its operations.

    Raises:
        RuntimeError: another or an unknown backend served an operation, or there was no operation.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # above the highest level of messages that the profiler has
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        line, numbers = main()
    # The source of `profile.events()`, which itself takes longer than the training.
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    numbers = {name: number.cpu() for name, number in numbers.items()}
    return Report(line, numbers, served([event.name() for event in events], backend))


def served(events: list[str], backend: str) -> dict[str, int]:
    """How often `backend` served each operation, from the profiler's events; see `perform`.

    The profiler has two events of an operation: PyTorch's dispatcher passes it on (`c10d::allreduce_`), and the backend
    that takes it makes a work (`ncclx_rs:all_reduce`).
    """
    handed_over = sum(event.startswith("c10d::") for event in events)
    works = Counter(match.groups() for event in events if (match := re.fullmatch(r"([a-z_]+):(\w+)", event)))
    others = sorted({f"{who}:{what}" for who, what in works if who != backend})
    if others:
        raise RuntimeError(f"expected {backend} to serve every operation, but others served some: {others}")
    if not handed_over or works.total() != handed_over:
        raise RuntimeError(f"expected {backend} to serve all operations, got {works.total()} of {handed_over}")
    return {what: count for (_, what), count in sorted(works.items())}


def run(main: Callable[[], Result]) -> None:
    """Runs an example on every rank under torchrun; rank 0 prints its line."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--backend", choices=("ncclx_rs", "gloo"), default="ncclx_rs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="a folder in which every rank leaves its report")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    use(arguments.device)
    dist.init_process_group(arguments.backend)
    report = perform(main, arguments.backend)
    name = Path(sys.argv[0]).stem
    if arguments.out:
        torch.save(vars(report), arguments.out / f"{name}{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        operations = sum(report.operations.values())
        ranks = dist.get_world_size()
        print(f"{name}: {report.line}; {arguments.backend} served all {operations} operations of rank 0 of {ranks}")
    dist.destroy_process_group()
