"""Trains with DeepSpeed's ZeRO in a given stage."""

import sys

import deepspeed
import torch

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
settings = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}},
    "zero_optimization": {"stage": int(sys.argv[1])},
}
engine, *_ = deepspeed.initialize(model=model, config=settings)
torch.manual_seed(1 + deepspeed.comm.get_rank())
inputs, targets = torch.randn(8, 8), torch.randn(8, 1)
for _ in range(3):
    loss = torch.nn.functional.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    deepspeed.comm.all_reduce(mean)
    if deepspeed.comm.get_rank() == 0:
        print(f"loss: {mean.item() / 2:.6f}", flush=True)
deepspeed.comm.destroy_process_group()
