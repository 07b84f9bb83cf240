"""Gives every rank the tensor of rank 0.

torchrun --nproc-per-node 2 examples/object_api/broadcast.py
"""

import ncclx_rs
import torch


def main() -> None:
    device = torch.device("cpu")
    comm = ncclx_rs.new_comm("ncclx", device, name="main")

    tensor = torch.arange(8.0) if comm.get_rank() == 0 else torch.empty(8)
    comm.broadcast(tensor, root=0, async_op=False)

    assert tensor.tolist() == list(range(8))
    print(f"rank {comm.get_rank()}: {tensor.tolist()}")
    comm.finalize()


if __name__ == "__main__":
    main()
