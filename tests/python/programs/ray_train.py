"""Trains with Ray Train, whose workers make a group of gloo."""

import json
import os
import sys
from pathlib import Path

# Every worker's lines are wanted, also those that are alike; nothing is sent anywhere.
os.environ.update(RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0")

import ray
import torch
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def work(settings: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = train.get_context().get_world_rank()
    torch.manual_seed(1 + rank)
    inputs, targets = torch.randn(8, 8), torch.randn(8, 1)
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / 2)
    if rank == 0:
        (Path(settings["folder"]) / "losses").write_text(json.dumps(losses))


ray.init(num_cpus=2, include_dashboard=False)
trainer = TorchTrainer(
    work,
    train_loop_config={"folder": sys.argv[1]},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
    run_config=RunConfig(storage_path=sys.argv[1]),
)
trainer.fit()
for loss in json.loads((Path(sys.argv[1]) / "losses").read_text()):
    print(f"loss: {loss:.6f}", flush=True)
