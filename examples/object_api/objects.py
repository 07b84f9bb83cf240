"""Exchanges Python objects.

torchrun --nproc-per-node 2 examples/object_api/objects.py
"""

from typing import Any

import ncclx_rs
import torch
from ncclx_rs import objcol


def main() -> None:
    comm = ncclx_rs.new_comm("ncclx", torch.device("cpu"), name="main")
    rank, size = comm.get_rank(), comm.get_size()

    everybodys: list[Any] = [None] * size
    objcol.all_gather_object(comm, everybodys, {"rank": rank, "loss": torch.tensor(0.5 * rank)})
    assert [entry["rank"] for entry in everybodys] == list(range(size))

    settings: list[Any] = ["adam", 1e-3] if rank == 0 else [None, None]
    objcol.broadcast_object_list(comm, settings, root=0)
    assert settings == ["adam", 1e-3]

    print(f"rank {rank}: {everybodys} {settings}")
    comm.finalize()


if __name__ == "__main__":
    main()
