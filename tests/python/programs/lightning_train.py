"""Trains with Lightning's DDP strategy, which takes gloo on CPUs."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        mean = self.all_gather(self.trainer.callback_metrics["loss"]).mean().item()
        if self.trainer.is_global_zero:
            print(f"loss: {mean:.6f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(0, verbose=False)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
assert trainer.world_size == 2
trainer.fit(Regression(), DataLoader(data, batch_size=8))
