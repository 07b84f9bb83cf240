"""Expert parallelism: each rank holds an expert, and all_to_all brings every token to the expert that its router picks.

torchrun --nproc-per-node 2 examples/strategies/ep.py

The number of tokens for each expert differs between steps and between ranks.
"""

import tiny
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

FEATURES, TOKENS = 16, 24


class Experts(nn.Module):
    """A layer of as many experts as there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(FEATURES, dist.get_world_size())
        torch.manual_seed(1 + dist.get_rank())
        self.expert = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, FEATURES))
        self.sent: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        weight, choice = self.router(tokens).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        sends = self.sent = choice.bincount(minlength=dist.get_world_size())
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends)
        there, back = receives.tolist(), sends.tolist()
        arrived = all_to_all_single_autograd(tokens[order], there, back, dist.group.WORLD)
        returned = all_to_all_single_autograd(self.expert(arrived), back, there, dist.group.WORLD)
        return torch.empty_like(tokens).index_put((order,), returned) * weight[:, None]


def main() -> tiny.Result:
    model = Experts().to(tiny.device)
    optimizer = tiny.descent(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, sent = [], []
    for _ in range(tiny.STEPS):
        tokens = torch.randn(TOKENS, FEATURES, generator=generator).to(tiny.device)
        loss = nn.functional.mse_loss(model(tokens), tokens.roll(1, dims=1).sin())
        loss.backward()
        for parameter in model.router.parameters():  # every rank has its own copy of the router
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(tiny.mean(loss))
        sent.append(model.sent)
    return tiny.learned(losses), {"losses": torch.stack(losses), "sent": torch.stack(sent), **model.state_dict()}


if __name__ == "__main__":
    tiny.run(main)
