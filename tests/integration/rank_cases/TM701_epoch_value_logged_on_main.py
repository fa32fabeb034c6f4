# ranks: 2  culprit: 0
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Encoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def error(self, batch):
        return (self.layer(batch[0]) - batch[0]).square().mean()

    def training_step(self, batch, index):
        loss = self.error(batch)
        self.log("train/error", loss)
        return loss

    def validation_step(self, batch, index):
        error = self.error(batch)
        if self.trainer.is_global_zero:  # twin: if True:
            self.log("val/error", error, sync_dist=True)  # <- cause
        if self.trainer.is_global_zero:
            self.log("val/norm", self.layer.weight.norm(), rank_zero_only=True, sync_dist=False)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def loader(items):
    return DataLoader(TensorDataset(torch.randn(items, 6)), batch_size=4)


trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Encoder(), loader(32), loader(16))
