"""Programs of other packages, made for gloo, run unchanged: requirements-programs.txt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import BACKEND, needs

pytestmark = pytest.mark.skipif(BACKEND != "ncclx_rs", reason="it takes over gloo")

PROGRAMS = Path(__file__).parent / "programs"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
WATCHDOG_SECONDS = 400


def train(*command: str, says: int = 2) -> list[float]:
    """Runs a program that asks for gloo; ``says`` processes tell that they do not run on it. Returns its losses."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "NCCLX_RS_INSTEAD_OF": "gloo", "NCCLX_RS_LOG": "info", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        check=False,
    )
    written = done.stdout + done.stderr
    assert done.returncode == 0, written
    assert written.count("groups that the program makes of gloo run on ncclx_rs") == says, written
    losses = [float(loss) for loss in re.findall(r"^loss: ([\d.]+)", done.stdout, re.MULTILINE)]
    assert len(losses) == 3, written
    return losses


def test_accelerate_trains() -> None:
    needs("accelerate", "accelerate is not installed")
    losses = train(*TORCHRUN, str(PROGRAMS / "accelerate_train.py"))
    assert losses[2] < losses[0]


def test_lightning_trains() -> None:
    needs("lightning", "lightning is not installed")
    losses = train(*TORCHRUN, str(PROGRAMS / "lightning_train.py"))
    assert losses[2] < losses[0]


def test_the_trainer_of_transformers_trains(tmp_path: Path) -> None:
    needs("transformers", "transformers is not installed")
    losses = train(*TORCHRUN, str(PROGRAMS / "transformers_train.py"), str(tmp_path))
    assert losses[2] < losses[0]


def test_deepspeed_trains_by_zero() -> None:
    needs("deepspeed", "DeepSpeed is not installed")
    losses = train(*TORCHRUN, str(PROGRAMS / "deepspeed_zero.py"), "3")
    assert losses[2] < losses[0]


def test_ray_trains(tmp_path: Path) -> None:
    needs("ray", "Ray is not installed")
    losses = train(str(PROGRAMS / "ray_train.py"), str(tmp_path))
    assert losses[2] < losses[0]
