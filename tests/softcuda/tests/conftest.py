"""Tests of the software CUDA. They run under `tests/softcuda/run`, which `make test-cuda` does."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
# Where test functions run in processes of their own, they find their modules here too.
sys.path.insert(0, str(FOLDER))

if not (torch.version.cuda or "").startswith("13."):
    # The one file that is left says what is lacking.
    collect_ignore_glob = ["test_[!w]*.py"]
elif "libcuda.so.1" not in os.environ.get("LD_PRELOAD", ""):
    raise RuntimeError("run these by `make test-cuda`: without the software CUDA they would try a real one")


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The twins of sample.cu in a shared library."""
    library = tmp_path_factory.mktemp("twins") / "twins.so"
    options = ["-x", "c++", "-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    subprocess.run(
        [*compiler, *options, f"-I{FOLDER.parent}/include", str(FOLDER / "sample.cu"), "-o", str(library)], check=True
    )
    return str(library)
