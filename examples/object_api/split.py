"""Makes a communicator of the even ranks and one of the odd ranks.

torchrun --nproc-per-node 4 examples/object_api/split.py
"""

import ncclx_rs
import torch
from ncclx_rs import ReduceOp


def main() -> None:
    comm = ncclx_rs.new_comm("ncclx", torch.device("cpu"), name="main")
    rank, size = comm.get_rank(), comm.get_size()

    groups = [list(range(start, size, 2)) for start in range(min(2, size))]
    half = comm.split(groups, name="half")
    assert half is not None
    tensor = torch.tensor([float(rank)])
    half.all_reduce(tensor, ReduceOp.SUM, async_op=False)

    assert tensor.item() == sum(groups[rank % len(groups)])
    print(f"rank {rank}: rank {half.get_rank()} of {half.get_size()}, whose ranks add up to {tensor.item()}")
    half.finalize()
    comm.finalize()


if __name__ == "__main__":
    main()
