"""Prints PyTorch's devices and versions as JSON, for run_gpu.py, which must not use CUDA itself."""

from __future__ import annotations

import json

import torch

devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
found = {
    "devices": [
        f"{each.name}, {each.total_memory >> 20} MiB, compute capability {each.major}.{each.minor}, "
        f"{each.multi_processor_count} multiprocessors"
        for each in devices
    ],
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, nccl)) or "none",
}
print(json.dumps(found))
