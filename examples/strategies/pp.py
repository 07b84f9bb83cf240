"""Pipeline parallelism: each rank holds some layers, and small batches pass from rank to rank.

torchrun --nproc-per-node 2 examples/strategies/pp.py

Trains with the schedule 1F1B, then with interleaved 1F1B, where each rank holds two stages.
"""

import tiny
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B


def trained(stages_per_rank: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * stages_per_rank
    parts = {index: tiny.stage(index, total) for index in range(rank, total, size)}
    stages = [PipelineStage(part, index, total, tiny.device) for index, part in parts.items()]
    schedule = (
        Schedule1F1B(stages[0], n_microbatches=size, loss_fn=tiny.loss)
        if stages_per_rank == 1
        else ScheduleInterleaved1F1B(stages, n_microbatches=size, loss_fn=tiny.loss)
    )

    optimizer = tiny.descent([parameter for part in parts.values() for parameter in part.parameters()])
    losses = []
    for step in range(tiny.STEPS):
        tokens, targets = tiny.batch(step)
        small: list[torch.Tensor] = []
        inputs = (tokens,) if rank == 0 else ()
        outputs = {"target": targets, "losses": small} if rank == size - 1 else {}
        schedule.step(*inputs, **outputs)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(small).mean().detach() if small else torch.zeros((), device=tiny.device)
        dist.broadcast(loss, src=size - 1)
        losses.append(loss)
    weights = {f"{index}/{key}": value for index, part in parts.items() for key, value in part.state_dict().items()}
    return losses, weights


def main() -> tiny.Result:
    numbers = {}
    for stages_per_rank in (1, 2):
        losses, weights = trained(stages_per_rank)
        numbers |= {f"{stages_per_rank}/losses": torch.stack(losses)}
        numbers |= {f"{stages_per_rank}/{key}": value for key, value in weights.items()}
    return f"1F1B and interleaved 1F1B, {tiny.learned(losses)}", numbers


if __name__ == "__main__":
    tiny.run(main)
