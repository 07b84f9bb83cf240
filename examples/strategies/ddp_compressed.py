"""Data parallelism (DDP) with compressed gradients: hooks of PyTorch send them in bfloat16, or as matrices of low rank.

torchrun --nproc-per-node 2 examples/strategies/ddp_compressed.py

PowerSGD (arXiv:1905.13727) starts operations in the callbacks of other operations. It gets a single bucket here: on the
CPU, callbacks of several buckets have no fixed order, on any backend.
"""

import tiny
import torch
from ddp import MEGABYTES, trained
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook


def main() -> tiny.Result:
    low_rank = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    ways = {
        "bfloat16": (default_hooks.bf16_compress_hook, None, MEGABYTES),
        "power_sgd": (powerSGD_hook.powerSGD_hook, low_rank, 25),
    }
    numbers = {}
    for name, way in ways.items():
        losses, weights = trained(*way)
        numbers |= {f"{name}/losses": torch.stack(losses)} | {f"{name}/{key}": weights[key] for key in weights}
    return tiny.learned(losses), numbers


if __name__ == "__main__":
    tiny.run(main)
