"""Collects a tensor of every rank, of equal and of different sizes.

torchrun --nproc-per-node 2 examples/object_api/all_gather.py
"""

import ncclx_rs
import torch


def main() -> None:
    device = torch.device("cpu")
    comm = ncclx_rs.new_comm("ncclx", device, name="main")
    rank, size = comm.get_rank(), comm.get_size()

    gathered = torch.empty(size, 4, device=device)
    comm.all_gather_single(gathered, torch.full((1, 4), float(rank)), async_op=False)
    assert gathered[:, 0].tolist() == list(range(size))

    uneven = [torch.empty(r + 1, device=device) for r in range(size)]
    comm.all_gather_v(uneven, torch.full((rank + 1,), float(rank)), async_op=False)
    assert all(part.tolist() == [r] * (r + 1) for r, part in enumerate(uneven))

    print(f"rank {rank}: {gathered[:, 0].tolist()} and {[part.tolist() for part in uneven]}")
    comm.finalize()


if __name__ == "__main__":
    main()
