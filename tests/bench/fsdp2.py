"""Lays FSDP2 on one backend beside FSDP2 on another, in alternating rounds of one run.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/bench/fsdp2.py --vs gloo

Model and data are those of `examples/train_fsdp2.py`. Each backend has a group and a copy of the model. Printed are the
time of a step, the share of it that goes to communication (as the example measures it, in steps of their own, since the
profiler takes time), and the ratios of both by round: above 1, the first backend is better.

What FSDP2 itself does for communication, as copying parameters together, is a part of that share. PyTorch's `fake`
backend, which does nothing, tells how large: no backend's share can be smaller.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from spread import spread
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile, record_function

NOTHING = "fake"

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
example: Any = importlib.import_module("train_fsdp2")


class Trainer:
    """A model on one backend."""

    def __init__(self, backend: str) -> None:
        group: Any = dist.new_group(backend=backend)
        torch.manual_seed(1)
        self.shape = example.Shape()
        self.model = example.Gpt(self.shape)
        example.shard(self.model, DeviceMesh.from_group(group, "cpu"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.corpus = example.read_corpus()
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def steps(self, count: int) -> float:
        """Seconds of a step, on the slowest rank."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            with record_function("train_step"):
                tokens, targets = example.draw_batch(self.corpus, self.shape, self.generator)
                loss: Any = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
        took = torch.tensor([(time.perf_counter() - began) / count])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    def share(self, count: int) -> float:
        """The part of some steps that goes to communication, on this rank."""
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.steps(count)
        return float(example.communication_share(profiler) or 0.0)


def by_round(values: dict[str, list[float]], above: str, below: str) -> list[float]:
    """What `above` took by what `below` took."""
    return [one / other for one, other in zip(values[above], values[below], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ncclx_rs")
    parser.add_argument("--vs", default="gloo")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="of each backend in a round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers `fake`
    names = [arguments.backend, arguments.vs, NOTHING]
    trainers = {name: Trainer(name) for name in names}
    for trainer in trainers.values():
        trainer.steps(arguments.steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    shares: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(arguments.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            times[name].append(trainers[name].steps(arguments.steps))
            shares[name].append(trainers[name].share(arguments.steps))
    if dist.get_rank() == 0:
        for name in names:
            print(f"{name:>10}: {spread(times[name], 1e3)} ms a step, {spread(shares[name], 100)} % in communication")
        ours, theirs, _ = names
        faster, less = by_round(times, theirs, ours), by_round(shares, theirs, ours)
        print(f"{theirs} by {ours}: time of a step {spread(faster)}, share of communication {spread(less)}")
        most = by_round(shares, theirs, NOTHING)
        print(f"{theirs} by {NOTHING}: share of communication {spread(most)}, the most that a backend can reach")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
