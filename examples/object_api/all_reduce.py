"""Sums a tensor over all ranks.

torchrun --nproc-per-node 2 examples/object_api/all_reduce.py
"""

import ncclx_rs
import torch
from ncclx_rs import ReduceOp


def main() -> None:
    device = torch.device("cpu")
    comm = ncclx_rs.new_comm("ncclx", device, name="main")
    rank, size = comm.get_rank(), comm.get_size()

    tensor = torch.full((1024,), float(rank + 1), device=device)
    comm.all_reduce(tensor, ReduceOp.SUM, async_op=False)

    assert tensor[0].item() == size * (size + 1) / 2
    print(f"rank {rank}: the sum is {tensor[0].item()}")
    comm.finalize()


if __name__ == "__main__":
    main()
