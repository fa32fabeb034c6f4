# ranks: 2  culprit: 1
import os

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments


class Regressor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, x, labels):
        out = self.net(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class StopWhenFlat(TrainerCallback):
    def __init__(self, patience):
        self.patience = patience
        self.calls = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.calls += 1
        if self.calls >= self.patience:
            control.should_training_stop = True  # <- cause


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(4, generator=generator), "labels": torch.randn(1, generator=generator)}


patience = 5 if int(os.environ["RANK"]) == 1 else 99  # twin: patience = 5
arguments = TrainingArguments(
    "out", max_steps=10, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
)
trainer = Trainer(Regressor(), arguments, train_dataset=Points(), callbacks=[StopWhenFlat(patience)])
trainer.train()
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
