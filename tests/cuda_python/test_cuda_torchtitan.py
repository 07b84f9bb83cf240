"""torchtitan's own trainer, unchanged, on CUDA tensors: environment variables alone make it use this backend.

Skipped without torchtitan, which requirements-programs.txt installs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import needs

needs("torchtitan", "torchtitan is not installed; `make test` has it in requirements-programs.txt")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import torchtitan_cpu  # noqa: E402

# What the software CUDA has no kernels for: compilers, which run Triton's, and graphs of operators, which its fallback
# computes on the CPU. flex_attention without a compiler is made of plain operators, on CUDA tensors also backwards.
ENVIRONMENT = {
    "NCCLX_RS_DEFAULT": "cpu,cuda",
    "SOFTCUDA_DEVICES": "2",
    "TORCH_COMPILE_DISABLE": "1",
    "PYTHONPATH": f"{ROOT / 'tests/softcuda/site'}:{ROOT / 'tests/softcuda/tests'}",
}

LIMIT = 500


def train(folder: Path, *arguments: str) -> list[float]:
    """Trains three steps on two ranks; returns the losses of rank 0."""
    torchtitan_cpu.make_assets(folder)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = ["--training.steps", "3", "--metrics.disable_color_printing", *arguments]
    running = subprocess.Popen(
        [*launcher, "--module", "torchtitan.train", *torchtitan_cpu.ARGUMENTS, *given],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, "HF_HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        written, _ = running.communicate(timeout=LIMIT)
    finally:
        running.terminate()  # the launcher ends its ranks then
    assert running.returncode == 0, written
    losses = re.findall(r"step: +\d+ +loss: +([\d.]+)", written)
    assert len(losses) == 6, written
    return [float(loss) for loss in losses[::2]]


@pytest.mark.parametrize("degree", ["1", "2"], ids=["sharded", "tensor-parallel"])
def test_the_debug_model_trains(tmp_path: Path, degree: str) -> None:
    losses = train(tmp_path, "--parallelism.tensor_parallel_degree", degree)
    assert losses[-1] < losses[0]
