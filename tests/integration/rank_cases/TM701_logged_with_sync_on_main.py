# ranks: 2  culprit: 0
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        norm = self.layer.weight.detach().norm()
        if self.global_rank == 0:  # twin: if True:
            self.log("norm", norm, sync_dist=True)  # <- cause

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
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
trainer.fit(Regression(), data)
