"""Checkpoints: saved by ranks that shard in one way, at once and in the background, and loaded by others.

torchrun --nproc-per-node 2 examples/strategies/checkpoint.py

A model and its optimizer's state, sharded by FSDP2, are loaded into a model that is cut by tensor parallelism.
"""

import shutil
import tempfile
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from tp import cut


def sharded(mesh: DeviceMesh) -> tiny.Transformer:
    model = tiny.Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, share: int) -> Tensor:
    tokens, targets = tiny.batch(number, share)
    loss = tiny.loss(model(tokens), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def whole(tensors: dict[str, object]) -> dict[str, Tensor]:
    """Copies of tensors, whole where they were sharded."""
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for k, v in tensors.items()}


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    moments = {
        f"momentum of {name}": optimizer.state[parameter]["momentum_buffer"]
        for name, parameter in model.named_parameters()
    }
    return whole(model.state_dict() | moments)


def work(folder: Path) -> tiny.Result:
    mesh = init_device_mesh(tiny.device.type, (dist.get_world_size(),))
    model = sharded(mesh)
    optimizer = tiny.descent(model.parameters())
    losses = [tiny.mean(step(model, optimizer, 0, dist.get_rank()))]
    before = everything(model, optimizer)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder / "now")
    # In a group of its own: its operations come at any time between those of the training.
    saving = dcp.async_save(
        state_of(model, optimizer), checkpoint_id=folder / "background", process_group=dist.new_group()
    )
    losses.append(tiny.mean(step(model, optimizer, 1, dist.get_rank())))  # goes on meanwhile
    saving.result()
    after = everything(model, optimizer)

    for name in ("now", "background"):
        other = tiny.Transformer()
        cut(other, mesh)
        its = tiny.descent(other.parameters())
        state = state_of(other, its)
        dcp.load(state, checkpoint_id=folder / name)
        set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loaded = everything(other, its)
        assert all(torch.equal(before[key], loaded[key]) for key in before), name
        losses.append(step(other, its, 1, 0))
    return "loaded what was saved", {"losses": torch.stack(losses), **after}


def main() -> tiny.Result:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    try:
        return work(Path(folder[0]))
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0])


if __name__ == "__main__":
    tiny.run(main)
