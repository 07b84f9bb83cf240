"""Whether the other tests here can run: where they cannot, this one skips and says why."""

from __future__ import annotations

import torch
from harness import lacking


def test_pytorch_is_built_for_cuda() -> None:
    if torch.version.cuda is None:
        lacking(f"PyTorch {torch.__version__} is built without CUDA")
    assert torch.cuda.get_device_name().startswith("Software CUDA")
