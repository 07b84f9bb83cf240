"""Data parallelism (DDP): gradients travel in buckets during the backward pass, as a communication hook says.

torchrun --nproc-per-node 2 examples/strategies/ddp.py

Trains with DDP's own all-reduce, then with a hook written here.
"""

import tiny
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# A tiny limit, for several buckets of a tiny model.
MEGABYTES = 0.02


# Without annotations of types, which DDP compares with its own.
def average_by_halves(group, bucket):
    """Averages a bucket in two all-reduces that run at the same time."""
    gradients = bucket.buffer()
    works = [dist.all_reduce(half, group=group, async_op=True) for half in gradients.chunk(2)]

    def divide(done):
        for half in done.value():
            half.wait()  # on a GPU, orders the current stream after it: the whole is done when both are submitted
        return gradients.div_(dist.get_world_size(group))

    return torch.futures.collect_all([work.get_future() for work in works]).then(divide)


def trained(
    hook: object = None, state: object = None, megabytes: float = MEGABYTES
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model = DistributedDataParallel(tiny.Transformer(), bucket_cap_mb=megabytes)
    if hook is not None:
        model.register_comm_hook(state, hook)
    optimizer = tiny.descent(model.parameters())
    losses = []
    for step in range(tiny.STEPS):
        with model.no_sync():  # the gradients of the first batch wait for the second's
            tokens, targets = tiny.batch(2 * step, dist.get_rank())
            (tiny.loss(model(tokens), targets) / 2).backward()
        tokens, targets = tiny.batch(2 * step + 1, dist.get_rank())
        loss = tiny.loss(model(tokens), targets)
        (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(tiny.mean(loss))
    return losses, model.module.state_dict()


def main() -> tiny.Result:
    numbers = {}
    for name, hook in {"none": None, "halves": average_by_halves}.items():
        losses, weights = trained(hook, dist.group.WORLD)
        numbers |= {f"{name}/losses": torch.stack(losses)} | {f"{name}/{key}": weights[key] for key in weights}
    return tiny.learned(losses), numbers


if __name__ == "__main__":
    tiny.run(main)
