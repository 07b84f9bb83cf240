"""torchtitan's training program. Skipped without torchtitan, which requirements-programs.txt installs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import BACKEND, needs

needs("torchtitan", "torchtitan is not installed; `make test` has it in requirements-programs.txt")

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="the default backend of this package")

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "torchtitan_cpu.py")


def train(*arguments: str, module: tuple[str, ...] = (), **variables: str) -> tuple[str, list[float]]:
    """Trains two steps on two ranks; returns their output, and the losses of rank 0."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, *module, EXAMPLE, "--training.steps", "2", "--metrics.disable_color_printing", *arguments],
        env={**os.environ, "NCCLX_RS_DEFAULT": "cpu,cuda", **variables},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    written = done.stdout + done.stderr
    assert done.returncode == 0, written
    losses = re.findall(r"step: +\d+ +loss: +([\d.]+)", written)
    assert len(losses) == 4, written
    return written, [float(loss) for loss in losses[::2]]


def test_the_debug_model_trains_in_tensor_parallel() -> None:
    _, losses = train("--parallelism.tensor_parallel_degree", "2")
    assert losses[1] < losses[0]


def test_the_debug_model_trains_sharded_in_torchcomms_mode() -> None:
    written, losses = train("--comm.mode", "torchcomms", module=("--module", "ncclx_rs.as_torchcomms"))
    assert "Using TorchComms backend" in written and "with backend ncclx_rs" in written
    assert losses[1] < losses[0]


def test_its_group_of_gloo_saves_checkpoints_while_it_trains(tmp_path: Path) -> None:
    saving = "--checkpoint.enable --checkpoint.interval 1 --checkpoint.async_mode async --dump_folder".split()
    written, losses = train(*saving, str(tmp_path), NCCLX_RS_INSTEAD_OF="gloo", NCCLX_RS_LOG="info")
    assert written.count("groups that the program makes of gloo run on ncclx_rs") == 2, written
    assert losses[1] < losses[0]
    saved = tmp_path / "checkpoint" / "step-1"
    assert {path.name for path in saved.iterdir()} >= {".metadata", "__0_0.distcp", "__1_0.distcp"}
