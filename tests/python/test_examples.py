"""Every example runs, as its own text says it is run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness import BACKEND

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=EXAMPLES.parent)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_a_gpt_trains_as_on_gloo() -> None:
    script = str(EXAMPLES / "compare_backends.py")
    assert "the losses agree" in run(sys.executable, script, "--backends", BACKEND, "gloo", "--steps", "5")


@pytest.mark.skipif(BACKEND != "ncclx_rs", reason="these examples name their backend")
@pytest.mark.parametrize("script", sorted((EXAMPLES / "object_api").glob("*.py")), ids=lambda script: script.stem)
def test_object_api_example(script: Path) -> None:
    told = re.search(r"^ *(torchrun .*)$", script.read_text(), re.MULTILINE)
    assert told, f"{script.name} does not say how it is run"
    launcher, *arguments = shlex.split(told.group(1))
    ranks = int(arguments[arguments.index("--nproc-per-node") + 1])
    printed = run(sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments)
    assert launcher == "torchrun"
    assert sorted(re.findall(r"rank (\d+): ", printed)) == [str(rank) for rank in range(ranks)], printed
