"""Fault-tolerant HSDP: FSDP2 within each replica and torchft's manager between them, all on ncclx_rs.

    pip install torchft-nightly==2026.10.26
    python examples/torchft/hsdp.py

Each of the two replicas has two processes, which shard the model. FSDP2 reduces gradients within a replica, and the
manager averages them between the replicas. One process is killed, and its peer in the replica is ended with it, as
torchrun would; the other replica continues. See replicas.py.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from replicas import TIMEOUT, ProcessConfig, Regression, main, parser
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torchft import Optimizer

RANKS = 2


def train(config: ProcessConfig) -> None:
    """One process of a replica."""
    store = dist.TCPStore("localhost", config.store_port)
    dist.init_process_group(
        "ncclx_rs",
        store=dist.PrefixStore("shards", store),
        rank=config.rank,
        world_size=config.ranks,
        timeout=TIMEOUT,
    )
    mesh = init_device_mesh("cpu", (config.ranks,), mesh_dim_names=("shard",))
    task = Regression(seed=100 + config.replica * config.ranks + config.rank)
    parts = [task.model[0], task.model[2], task.model]
    for part in parts:
        fully_shard(part, mesh=mesh)
    inner = torch.optim.SGD(task.model.parameters(), lr=0.02, momentum=0.9)

    # Taken once: torchft asks in the middle of a step, in a thread of its own, and FSDP2 reshards the model each time.
    shards = task.model.state_dict()

    def state_dict() -> dict[str, Any]:
        state = {"model": shards, "optimizer": inner.state_dict()}
        # Each process gives its shards to its counterpart in the other replica, whose mesh is another.
        return tree_map(lambda value: value.to_local() if isinstance(value, DTensor) else value, state)

    def load_state_dict(state: dict[str, Any]) -> None:
        for name, shard in shards.items():
            shard.to_local().copy_(state["model"][name])
        # Which is empty before the first step; both replicas may begin at the same time.
        numbered = list(shards.values())
        for number, own in state["optimizer"]["state"].items():
            like = numbered[number]
            own["momentum_buffer"] = DTensor.from_local(
                own["momentum_buffer"], mesh, like.placements, shape=like.shape, stride=like.stride()
            )
        inner.load_state_dict(state["optimizer"])

    manager = config.manager(state_dict=state_dict, load_state_dict=load_state_dict)
    for part in parts:
        part.set_all_reduce_hook(lambda reduced: manager.allreduce(reduced).wait())
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < config.last.value:
        optimizer.zero_grad()
        loss = task.loss(task.model)
        loss.backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            config.stepped(manager, loss.item())
        time.sleep(config.pace)
    config.done(parameter.to_local() for parameter in task.model.parameters())
    manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(train, parser().parse_args(), RANKS)
