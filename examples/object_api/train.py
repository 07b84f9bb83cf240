"""Data-parallel training written out: gradients are averaged by all_reduce while the next ones are computed.

torchrun --nproc-per-node 2 examples/object_api/train.py
"""

import ncclx_rs
import torch
from ncclx_rs import ReduceOp, TorchWork
from torch import nn


def main(steps: int = 60) -> None:
    comm = ncclx_rs.new_comm("ncclx", torch.device("cpu"), name="main")
    rank = comm.get_rank()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    for parameter in model.parameters():
        comm.broadcast(parameter.data, root=0, async_op=False)

    works: list[TorchWork] = []

    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        works.append(comm.all_reduce(parameter.grad, ReduceOp.AVG, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(64, 8, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
        for work in works:
            work.wait()
        works.clear()
        optimizer.step()
        losses.append(loss.item())

    # The ranks have stayed together.
    first = next(model.parameters()).detach()
    everybodys = [torch.empty_like(first) for _ in range(comm.get_size())]
    comm.all_gather(everybodys, first.contiguous(), async_op=False)
    assert all(torch.equal(other, first) for other in everybodys)
    assert losses[-1] < losses[0]
    print(f"rank {rank}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    comm.finalize()


if __name__ == "__main__":
    main()
