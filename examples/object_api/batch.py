"""Sends and receives several tensors at the same time, in both directions round a ring.

torchrun --nproc-per-node 3 examples/object_api/batch.py
"""

import ncclx_rs
import torch


def main() -> None:
    device = torch.device("cpu")
    comm = ncclx_rs.new_comm("ncclx", device, name="main")
    rank, size = comm.get_rank(), comm.get_size()
    after, before = (rank + 1) % size, (rank - 1) % size

    batch = comm.batch_op_create()
    from_before, from_after = torch.empty(1024), torch.empty(1024)
    batch.send(torch.full((1024,), float(rank)), after)
    batch.recv(from_before, before)
    batch.send(torch.full((1024,), -float(rank)), before)
    batch.recv(from_after, after)
    batch.issue(async_op=True).wait()

    # With two ranks the neighbours are one: messages between two ranks match in the order of the batch.
    assert from_before[0].item() == before and from_after[0].item() == -after
    print(f"rank {rank}: {from_before[0].item()} from {before}, {from_after[0].item()} from {after}")
    comm.finalize()


if __name__ == "__main__":
    main()
