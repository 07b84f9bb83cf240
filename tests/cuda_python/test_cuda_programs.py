"""Programs for several ranks on CUDA tensors: their numbers equal those of the same programs on CPU tensors.

The programs are those of examples/strategies, and one that has no example there.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from unittest import mock

import ncclx_rs
import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, World, fresh_store
from torch.distributed.optim import ZeroRedundancyOptimizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "strategies"))

import run  # noqa: E402
import tiny  # noqa: E402

# Sums of other orders within operators: PyTorch chooses another kernel of attention for another device.
TOLERANCES = {**run.TOLERANCES, "fsdp2": 1e-2}


def zero() -> tiny.Result:
    """ZeRO: each rank has the optimizer's state of some parameters, updates them, and sends them to all."""
    model = tiny.Transformer()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.2, momentum=0.9)
    losses = []
    for step in range(tiny.STEPS):
        tokens, targets = tiny.batch(step, dist.get_rank())
        loss = tiny.loss(model(tokens), targets)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = tiny.mean(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(tiny.mean(loss))
    return tiny.learned(losses), {"losses": torch.stack(losses), **model.state_dict()}


def report(name: str, device: torch.device, rank: int, size: int) -> tiny.Report:
    with mock.patch.multiple(tiny, device=device, STEPS=3):
        if name != "zero":
            return run.report(name, BACKEND, fresh_store(), rank, size)
        dist.init_process_group(BACKEND, store=fresh_store(), rank=rank, world_size=size)
        try:
            return tiny.perform(zero, BACKEND)
        finally:
            dist.destroy_process_group()


def numbers_equal(rank: int, size: int, name: str) -> None:
    new_comm = functools.partial(ncclx_rs.new_comm, store=fresh_store(), rank=rank, size=size)
    with mock.patch.object(ncclx_rs, "new_comm", new_comm):
        device = torch.device("cuda", torch.cuda.current_device())
        ours = report(name, device, rank, size)
        # PowerSGD waits for a GPU where there is one, even if it is not used.
        with mock.patch.object(torch.cuda, "is_available", return_value=False):
            expected = report(name, torch.device("cpu"), rank, size)
    apart = run.difference(ours.numbers, expected.numbers)
    assert apart <= TOLERANCES.get(name, run.TOLERANCE), f"{name}, rank {rank}: {apart}"


@pytest.mark.parametrize(
    "name", ["ddp", "ddp_compressed", "fsdp2", "tp", "redistribute", "ep", "cp", "checkpoint", "zero"]
)
def test_program_equals_the_cpu(quick_world: World, name: str) -> None:
    quick_world.run(numbers_equal, name, join=False)


@pytest.mark.parametrize("name", ["hsdp"])
def test_program_equals_the_cpu_on_four_ranks(four: World, name: str) -> None:
    four.run(numbers_equal, name, join=False)
