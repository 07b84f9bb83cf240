"""Computes while a tensor is summed over all ranks.

torchrun --nproc-per-node 2 examples/object_api/all_reduce_async.py
"""

import ncclx_rs
import torch
from ncclx_rs import ReduceOp


def main() -> None:
    device = torch.device("cpu")
    comm = ncclx_rs.new_comm("ncclx", device, name="main")
    rank, size = comm.get_rank(), comm.get_size()

    tensor = torch.full((1_000_000,), float(rank + 1), device=device)
    work = comm.all_reduce(tensor, ReduceOp.SUM, async_op=True)
    product = torch.ones(64, 64) @ torch.ones(64, 64)  # anything that leaves `tensor` alone
    work.wait()

    assert tensor[0].item() == size * (size + 1) / 2 and product[0, 0].item() == 64
    print(f"rank {rank}: {work.status.name}, the sum is {tensor[0].item()}")
    comm.finalize()


if __name__ == "__main__":
    main()
