"""Tests of the software CUDA. They run under `tests/softcuda/run`, which `make test-cuda` does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

# Where test functions run in processes of their own, they find their modules here too.
sys.path.insert(0, str(Path(__file__).parent))

if torch.version.cuda is None:
    from harness import lacking

    lacking(f"PyTorch {torch.__version__} is built without CUDA; the software CUDA is for a wheel that has it")
if "libcuda.so.1" not in os.environ.get("LD_PRELOAD", ""):
    raise RuntimeError("run these by `make test-cuda`: without the software CUDA they would try a real one")
