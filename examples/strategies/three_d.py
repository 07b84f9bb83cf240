"""Pipeline, data and tensor parallelism at the same time, over one mesh of three dimensions.

torchrun --nproc-per-node 8 examples/strategies/three_d.py

With ncclx_rs, one communicator is split into the mesh, and the ranks with the most communication share a host.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import ncclx_rs
import tiny
import torch
import torch.distributed as dist
from ncclx_rs import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from tp import cut


@contextmanager
def mesh_of(dimensions: dict[str, int]) -> Iterator[DeviceMesh]:
    if dist.get_backend() != "ncclx_rs":
        yield init_device_mesh(tiny.device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
        return
    comm = ncclx_rs.new_comm("ncclx", tiny.device, name="world")
    mesh = device_mesh.build(comm, dimensions)
    yield mesh
    device_mesh.close(mesh)
    comm.finalize()


def main() -> tiny.Result:
    size = dist.get_world_size()
    tensor = 2 if size % 4 == 0 else 1
    with mesh_of({"pp": 2, "dp": size // 2 // tensor, "tp": tensor}) as mesh:
        return train(mesh)


def train(mesh: DeviceMesh) -> tiny.Result:
    index, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    model = tiny.stage(index, stages)
    if mesh["tp"].size() > 1:
        cut(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    stage = PipelineStage(model, index, stages, tiny.device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, n_microbatches=2 * stages, loss_fn=tiny.loss)

    optimizer = tiny.descent(model.parameters())
    losses = []
    for step in range(tiny.STEPS):
        tokens, targets = tiny.batch(step, share=mesh.get_local_rank("dp"))
        small: list[torch.Tensor] = []
        if index == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=small)
        optimizer.step()
        optimizer.zero_grad()
        # Only last stages have losses; the others give zeros.
        loss = torch.stack(small).mean() if small else torch.zeros((), device=tiny.device)
        losses.append(tiny.mean(loss) * stages)

    whole = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    shape = " x ".join(f"{mesh[name].size()} {name}" for name in ("pp", "dp", "tp"))
    return f"{shape}, {tiny.learned(losses)}", {"losses": torch.stack(losses), **whole}


if __name__ == "__main__":
    tiny.run(main)
