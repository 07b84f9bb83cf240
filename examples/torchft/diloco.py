"""Replicas that train alone and rarely communicate, after DiLoCo (arXiv:2311.08105) or as local SGD, on ncclx_rs.

    pip install torchft-nightly==2026.10.26
    python examples/torchft/diloco.py
    python examples/torchft/diloco.py --local-sgd

Every few steps, the two replicas average: with DiLoCo the changes of parameters, which a second optimizer takes as
gradients; with local SGD the parameters themselves. One replica is killed and comes back; see replicas.py.
"""

from __future__ import annotations

import functools
import time

import torch
from replicas import ProcessConfig, Regression, main, parser
from torchft.local_sgd import DiLoCo, LocalSGD

SYNC_EVERY = 4


def train(config: ProcessConfig, local_sgd: bool) -> None:
    """One replica. The manager counts a step each time that the replicas average."""
    task = Regression(seed=100 + config.replica)
    inner = torch.optim.AdamW(task.model.parameters(), lr=0.01)
    outer = torch.optim.SGD(task.model.parameters(), lr=0.7, momentum=0.5, nesterov=True)
    manager = config.manager(
        state_dict=lambda: {"model": task.model.state_dict(), "inner": inner.state_dict()},
        load_state_dict=lambda state: (
            task.model.load_state_dict(state["model"]),
            inner.load_state_dict(state["inner"]),
        ),
        use_async_quorum=False,
    )
    if local_sgd:
        averaging = LocalSGD(manager, task.model, inner, sync_every=SYNC_EVERY)
    else:
        averaging = DiLoCo(manager, [task.model], inner, outer, sync_every=SYNC_EVERY)
    with averaging:
        while manager.current_step() < config.last.value:
            inner.zero_grad()
            loss = task.loss(task.model)
            loss.backward()
            before = manager.current_step()
            inner.step()
            if manager.current_step() > before:
                config.stepped(manager, loss.item())
            time.sleep(config.pace / SYNC_EVERY)
    config.done(task.model.parameters())
    manager.shutdown()


if __name__ == "__main__":
    arguments = parser()
    arguments.add_argument("--local-sgd", action="store_true", help="average the parameters themselves")
    options = arguments.parse_args()
    main(functools.partial(train, local_sgd=options.local_sgd), options)
