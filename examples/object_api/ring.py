"""Passes tensors round a ring of ranks.

torchrun --nproc-per-node 3 examples/object_api/ring.py
"""

import ncclx_rs
import torch


def main() -> None:
    device = torch.device("cpu")
    comm = ncclx_rs.new_comm("ncclx", device, name="main")
    rank, size = comm.get_rank(), comm.get_size()
    after, before = (rank + 1) % size, (rank - 1) % size

    outgoing = torch.full((1024,), float(rank), device=device)
    incoming = torch.empty_like(outgoing)
    received = comm.recv(incoming, before, async_op=True)
    comm.send(outgoing, after, async_op=True).wait()
    received.wait()

    assert incoming[0].item() == before
    print(f"rank {rank}: received {incoming[0].item()} from rank {before}")
    comm.finalize()


if __name__ == "__main__":
    main()
