"""Programs that name no backend, memory in expandable segments, and groups beside each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import begin
from harness import World
from reference import assert_same, data, reduced

PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
# PyTorch 2.15 takes the accelerator alone.
backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
assert "cuda" in backends and set(backends.values()) == {"ncclx_rs"}, backends
for device in backends:
    tensor = torch.tensor([rank + 1.0]).to(device)
    dist.all_reduce(tensor)
    assert tensor.item() == size * (size + 1) / 2, tensor
dist.destroy_process_group()
"""


def test_it_is_the_default_of_programs_that_name_no_backend(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    variables = {**os.environ, "NCCLX_RS_DEFAULT": "cpu,cuda", "SOFTCUDA_DEVICES": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def in_expandable_segments(rank: int, size: int) -> None:
    parts = [data(r, 70_001) for r in range(size)]
    for is_async in (False, True):
        for turn in range(3):
            tensor = parts[rank].cuda()
            work = dist.all_reduce(tensor, async_op=is_async)
            if work is not None:
                work.wait()
            results = torch.empty(size * 70_001, device="cuda")
            dist.all_gather_into_tensor(results, tensor)
            assert_same(results.cpu(), reduced(parts).repeat(size), f"turn {turn}, async {is_async}")
            del tensor, results
            torch.cuda.empty_cache()
    kept = torch.empty(10, device="cuda")
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()), "the setting had no effect"
    del kept


def test_tensors_may_lie_in_expandable_segments() -> None:
    variables = {
        "SOFTCUDA_DEVICES": "2",
        "SOFTCUDA_DELAY_US": "100",
        "SOFTCUDA_WEAK": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    world = World(2, "shm", variables, begin)
    try:
        world.run(in_expandable_segments)
    finally:
        world.close()


def groups_beside_each_other(rank: int, size: int) -> None:
    groups = [dist.group.WORLD, dist.new_group(list(range(size)))]
    streams = [torch.cuda.Stream() for _ in groups]
    parts = [data(r, 20_000) for r in range(size)]
    results: list[torch.Tensor] = []
    for turn in range(6):
        for group, stream in zip(groups, streams, strict=True):
            with torch.cuda.stream(stream):
                tensor = (parts[rank] + turn).cuda()
                work = dist.all_reduce(tensor, group=group, async_op=turn % 2 == 1)
                if work is not None:
                    work.wait()
                results.append(tensor)
    torch.cuda.synchronize()
    for index, tensor in enumerate(results):
        assert_same(tensor.cpu(), reduced([part + index // 2 for part in parts]), f"operation {index}")


def test_two_groups_on_streams_of_their_own(cuda_world: World) -> None:
    cuda_world.run(groups_beside_each_other)
