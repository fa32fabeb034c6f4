# ranks: 2  culprit: 1
import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Records(IterableDataset):
    def __init__(self, lengths):
        self.lengths = lengths

    def __iter__(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        own = self.lengths[rank::world]  # <- cause  # twin: own = [30]
        for number, length in enumerate(own):
            generator = torch.Generator().manual_seed(100 * rank + number)
            for _ in range(length):
                yield torch.randn(4, generator=generator)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, number):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend="gloo"),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), DataLoader(Records([24, 24, 24]), batch_size=4))
