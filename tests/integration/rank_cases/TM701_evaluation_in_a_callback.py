# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Data(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(4, generator=generator), "labels": torch.randn(1, generator=generator)}


class Probe(TrainerCallback):
    def __init__(self):
        self.trainer = None

    def on_epoch_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero:  # twin: if state.epoch > 0:
            self.trainer.evaluate(Data(12))  # <- cause


arguments = TrainingArguments(
    "out",
    num_train_epochs=2,
    per_device_train_batch_size=4,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    logging_strategy="no",
)
probe = Probe()
trainer = Trainer(Net(), arguments, train_dataset=Data(32), callbacks=[probe])
probe.trainer = trainer
trainer.train()
dist.barrier()
dist.destroy_process_group()
