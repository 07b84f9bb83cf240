"""DTensor redistribution: a tensor goes from every placement to every other, over meshes of one and of two dimensions.

torchrun --nproc-per-node 2 examples/strategies/redistribute.py

The tensor's sizes do not divide by the number of ranks, so that shards are uneven and some are empty.
"""

import itertools
import logging

import tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

PLACEMENTS = (Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("avg"), Partial("max"))


def placed(mesh: DeviceMesh, placements: tuple[Placement, ...], dtype: torch.dtype) -> DTensor:
    """A tensor of 7 x 5 on the mesh. Where it is partial, the ranks hold different addends."""
    torch.manual_seed(0)
    whole = torch.randn(7, 5).to(dtype) if dtype.is_floating_point else torch.randint(-9, 9, (7, 5), dtype=dtype)
    whole = whole.to(tiny.device)
    copies = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
    local = distribute_tensor(whole, mesh, copies).to_local()
    if copies != placements:
        local = local * (dist.get_rank() + 1)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def every_pair(mesh: DeviceMesh, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """This rank's part of the tensor after each change."""
    choices = [p for p in PLACEMENTS if dtype.is_floating_point or p != Partial("avg")]
    # DTensor mixes no reductions.
    every = [p for p in itertools.product(choices, repeat=mesh.ndim) if len({x for x in p if x.is_partial()}) <= 1]
    numbers = {}
    for source in every:
        for target in every:
            # It knows no way into a partial tensor but from an equal one.
            if any(t.is_partial() and s != t for s, t in zip(source, target, strict=True)):
                continue
            changed = placed(mesh, source, dtype).redistribute(mesh, target)
            numbers[f"{mesh.shape} {dtype} {source} {target}"] = changed.to_local()
    return numbers


def main() -> tiny.Result:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it would rather have the mesh flattened
    size = dist.get_world_size()
    line, square = init_device_mesh(tiny.device.type, (size,)), init_device_mesh(tiny.device.type, (2, size // 2))
    numbers = {}
    for mesh, dtype in ((line, torch.float32), (line, torch.int64), (square, torch.float32)):
        numbers |= every_pair(mesh, dtype)
    return f"{len(numbers)} pairs of placements", numbers


if __name__ == "__main__":
    tiny.run(main)
