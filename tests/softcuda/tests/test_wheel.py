"""Whether the other tests here can run: where they cannot, this one skips and says why."""

from __future__ import annotations

import torch
from harness import lacking


def test_pytorch_is_built_for_cuda() -> None:
    if not (torch.version.cuda or "").startswith("13."):
        lacking(f"PyTorch {torch.__version__} is not built for CUDA 13, which the software CUDA takes the place of")
    assert torch.cuda.get_device_name().startswith("Software CUDA")
