"""What an installed wheel is tried by: two ranks use it as a backend and by its objects.

python -m torch.distributed.run --standalone --nproc-per-node 2 packaging/smoke.py
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("ncclx_rs")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.eq(size * (size + 1) / 2).all(), tensor
    gathered = [torch.empty(3) for _ in range(size)]
    dist.all_gather(gathered, torch.full((3,), float(rank)))
    assert [part[0].item() for part in gathered] == list(range(size)), gathered
    if find_spec("numpy") is not None:  # without it, PyTorch has no collectives of objects
        objects: list[object] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": other} for other in range(size)], objects
    try:
        dist.broadcast(torch.ones(2).to_sparse(), 0)
    except (RuntimeError, ValueError) as error:
        assert "sparse" in str(error).lower(), error
    else:
        raise AssertionError("a broadcast of a sparse tensor was not refused")
    dist.barrier()
    dist.destroy_process_group()

    import ncclx_rs

    comm = ncclx_rs.new_comm("ncclx", torch.device("cpu"), name="smoke")
    tensor = torch.ones(10, dtype=torch.int64)
    comm.all_reduce(tensor, ncclx_rs.ReduceOp.SUM, async_op=False)
    assert tensor.eq(size).all(), tensor
    comm.finalize()
    if rank == 0:
        from ncclx_rs._load import native

        built_for = native().torch_build_version
        print(f"ncclx_rs {ncclx_rs.__version__} works: torch {torch.__version__}, its part for {built_for}")


if __name__ == "__main__":
    main()
