# ranks: 2  culprit: any
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class TwoHeads(lightning.LightningModule):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.body, self.head, self.side = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        h = self.body(x)
        return self.head(h), self.side(h)  # <- cause

    def training_step(self, batch, index):
        main, side = self(batch[0])
        loss = main.square().mean()
        return loss + self.weight * side.square().mean() if self.weight else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = TwoHeads(0.0)  # twin: model = TwoHeads(0.5)
trainer.fit(model, data)
