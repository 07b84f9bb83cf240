"""Trains with Accelerate, which takes no backend on CPUs but those whose names it knows."""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2, accelerator.num_processes
model = torch.nn.Linear(8, 1)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
for _ in range(3):
    losses = []
    for inputs, targets in batches:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = accelerator.reduce(torch.stack(losses), reduction="mean").mean().item()
    if accelerator.is_main_process:
        print(f"loss: {mean:.6f}", flush=True)
assert gather_object([accelerator.process_index]) == [0, 1]
assert len(accelerator.gather(torch.ones(3))) == 6
accelerator.end_training()
