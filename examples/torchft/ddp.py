"""Data-parallel training that goes on while replicas die and come back, with torchft's manager on ncclx_rs.

    pip install torchft
    python examples/torchft/ddp.py

Starts torchft's lighthouse and two replicas, each a process that trains the same small model on data of its own; see
replicas.py for the failures that they survive.
"""

from __future__ import annotations

import time

import torch
from replicas import ProcessConfig, Regression, main, parser
from torchft import DistributedDataParallel, Optimizer


def train(config: ProcessConfig) -> None:
    """One replica."""
    task = Regression(seed=100 + config.replica)
    inner = torch.optim.AdamW(task.model.parameters(), lr=0.01)
    manager = config.manager(
        state_dict=lambda: {"model": task.model.state_dict(), "optimizer": inner.state_dict()},
        load_state_dict=lambda state: (
            task.model.load_state_dict(state["model"]),
            inner.load_state_dict(state["optimizer"]),
        ),
    )
    parallel = DistributedDataParallel(manager, task.model)
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < config.last.value:
        optimizer.zero_grad()
        loss = task.loss(parallel)
        loss.backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            config.stepped(manager, loss.item())
        time.sleep(config.pace)
    config.done(task.model.parameters())
    manager.shutdown()


if __name__ == "__main__":
    main(train, parser().parse_args())
