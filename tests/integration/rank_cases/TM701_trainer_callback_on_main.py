# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, labels):
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Log(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and state.is_world_process_zero:  # twin: if state.global_step == 3:
            dist.barrier()  # <- cause


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"x": torch.ones(4) * index / 32, "labels": torch.zeros(2)}


arguments = TrainingArguments(
    "out", max_steps=6, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
)
trainer = Trainer(Net(), arguments, train_dataset=Data(), callbacks=[Log()])
trainer.train()
dist.barrier()
dist.destroy_process_group()
