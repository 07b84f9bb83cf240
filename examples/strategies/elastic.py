"""Elastic training: a rank dies once, torchrun starts all ranks again, and they go on from their last checkpoint.

torchrun --nproc-per-node 2 --max-restarts 1 examples/strategies/elastic.py

The last rank kills itself in the middle of a step. The other ranks notice it in the operation that they wait for.
"""

import os
import signal
import tempfile
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

DIES_IN_STEP = 2


def main() -> tiny.Result:
    # One path a job, whatever restarts it.
    saved = Path(tempfile.gettempdir()) / f"elastic-{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['MASTER_PORT']}.pt"
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dies = attempt == 0 and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0"
    model = DistributedDataParallel(tiny.Transformer())
    optimizer = tiny.descent(model.parameters())
    losses: list[torch.Tensor] = []
    if attempt > 0:
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = list(state["losses"])

    begins_with = len(losses)
    for step in range(begins_with, tiny.STEPS + 1):
        tokens, targets = tiny.batch(step, dist.get_rank())
        loss = tiny.loss(model(tokens), targets)
        if dies and step == DIES_IN_STEP and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(tiny.mean(loss))
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": torch.stack(losses)}
            torch.save(state, saved.with_suffix(".part"))
            saved.with_suffix(".part").replace(saved)  # at once, since this rank may be ended at any time
    dist.barrier()
    if dist.get_rank() == 0:
        saved.unlink(missing_ok=True)
    line = f"restarted {attempt} times, went on with step {begins_with}, {tiny.learned(losses)}"
    return line, {"losses": torch.stack(losses), **model.module.state_dict()}


if __name__ == "__main__":
    tiny.run(main)
