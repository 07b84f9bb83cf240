"""The training example gives the same losses on the backend under test and on gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness import BACKEND

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_gpt_trains_as_on_gloo() -> None:
    command = [sys.executable, str(EXAMPLES / "compare_backends.py"), "--backends", BACKEND, "gloo", "--steps", "5"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "the losses agree" in finished.stdout
