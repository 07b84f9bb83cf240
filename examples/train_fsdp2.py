"""Trains a small GPT on the source text of Python's standard library, sharded with FSDP2 on CPUs.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_fsdp2.py --backend ncclx_rs

The program asks `init_process_group` for a backend by name and is otherwise ordinary PyTorch. Everything is seeded: two
runs on one machine that differ only in the backend must show the same losses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

BYTES = 256
CORPUS_BYTES = 500_000
PRINT_EVERY = 25
# The steps that the profiler watches, late enough for everything to be warm.
PROFILED = range(10, 15)


@dataclass(frozen=True)
class Shape:
    """The shape of the model and of a batch."""

    layers: int = 4
    width: int = 160
    heads: int = 5
    context: int = 128
    batch: int = 8


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.project_in = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.project_out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.project_in(x).view(batch, length, 3 * self.heads, width // self.heads).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(rotate(query, rotation), rotate(key, rotation), value, is_causal=True)
        return self.project_out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One layer: attention and a feed-forward network, each with a norm before it and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.feed_forward = nn.Sequential(
            nn.RMSNorm(shape.width),
            nn.Linear(shape.width, 4 * shape.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width, bias=False),
        )

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(x)


class Gpt(nn.Module):
    """A decoder over bytes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.register_buffer("rotation", rotations(shape.context, shape.width // shape.heads), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_shortcut = name.endswith(("project_out.weight", "feed_forward.3.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if into_shortcut else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotation)
        return self.head(self.norm(x))


def rotations(length: int, width: int) -> Tensor:
    """Cosines and sines of every position's angles (Su et al., RoFormer, 2021)."""
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns each pair of features by the angle of its position."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def read_corpus() -> Tensor:
    """The first modules of the standard library, by name, as bytes."""
    text = b""
    for module in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py")):
        text += module.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(bytearray(text[:CORPUS_BYTES]), dtype=torch.uint8).long()


def draw_batch(corpus: Tensor, shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the corpus, and the same windows one byte later."""
    starts = torch.randint(len(corpus) - shape.context, (shape.batch,), generator=generator)
    windows = corpus[starts[:, None] + torch.arange(shape.context + 1)]
    return windows[:, :-1], windows[:, 1:]


def shard(model: Gpt, mesh: DeviceMesh) -> None:
    """Spreads every parameter over the ranks; each block is gathered on its own when it is needed."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def communication_share(profiler: profile) -> float | None:
    """The share of the profiled time in which FSDP gathered parameters and reduced gradients, with waits."""
    events = profiler.key_averages()
    # Forward and backward hooks nest these ranges in others, but never in each other.
    ranges = ("FSDP::all_gather", "FSDP::post_backward_reduce")
    spent = sum(event.cpu_time_total for event in events if event.key.startswith(ranges))
    total = sum(event.cpu_time_total for event in events if event.key == "train_step")
    return spent / total if total else None


@dataclass
class Report:
    """The report of a run."""

    backend: str
    world_size: int
    torch: str
    parameters: int
    losses: list[float]
    seconds: float
    communication_share: float | None


def train(arguments: argparse.Namespace, shape: Shape) -> Report:
    """Trains on every rank; the losses are means over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(arguments.seed)
    model = Gpt(shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    group = dist.group.WORLD
    assert group is not None
    shard(model, DeviceMesh.from_group(group, "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    generator = torch.Generator().manual_seed(arguments.seed * size + rank)
    corpus = read_corpus()

    losses: list[float] = []
    profiler = None
    if arguments.profile and arguments.steps >= PROFILED.stop:
        profiler = profile(activities=[ProfilerActivity.CPU])
    # Without a terminal, an update every few seconds is enough.
    interval = 0.1 if sys.stderr.isatty() else 5.0
    bar = tqdm(range(arguments.steps), desc=arguments.backend, unit="step", mininterval=interval, disable=rank != 0)
    dist.barrier()
    started = time.perf_counter()
    for step in bar:
        if profiler and step == PROFILED.start:
            profiler.start()
        with torch.profiler.record_function("train_step"):
            tokens, targets = draw_batch(corpus, shape, generator)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            warm_up.step()
            mean = loss.detach()
            dist.all_reduce(mean)
            losses.append(mean.item() / size)
        if profiler and step == PROFILED.stop - 1:
            profiler.stop()
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        if rank == 0 and (step % PRINT_EVERY == 0 or step == arguments.steps - 1):
            bar.write(f"step {step:4d}   loss {losses[-1]:.4f}")
    seconds = time.perf_counter() - started
    share = communication_share(profiler) if profiler else None
    return Report(arguments.backend, size, torch.__version__, parameters, losses, seconds, share)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ncclx_rs", help="as given to init_process_group")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--profile", action="store_true", help="measure the share of communication in a few steps")
    parser.add_argument("--out", type=Path, help="where to write losses and times, as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group(arguments.backend)
    try:
        used = dist.get_backend()
        assert used == arguments.backend, f"asked for {arguments.backend}, got {used}"
        report = train(arguments, Shape())
        if dist.get_rank() == 0:
            print(f"{used}: {report.parameters:,} parameters on {report.world_size} ranks, {report.seconds:.1f} s")
            if arguments.out:
                arguments.out.write_text(json.dumps(asdict(report)))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
