# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(4, generator=generator), "labels": torch.randn(1, generator=generator)}


class LoggingTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        out = model(**inputs)
        if self.state.global_step % 3 == 2 and self.is_world_process_zero():  # twin: if self.state.global_step % 3 == 2:
            spread = self.accelerator.gather(out["loss"].detach().reshape(1)).std()  # <- cause
            self.state.log_history.append({"spread": spread.item()})
        return (out["loss"], out) if return_outputs else out["loss"]


arguments = TrainingArguments(
    "out",
    max_steps=8,
    per_device_train_batch_size=2,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    logging_strategy="no",
)
LoggingTrainer(Net(), arguments, train_dataset=Data()).train()
dist.barrier()
dist.destroy_process_group()
