# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x, whole=False):
        x = torch.tanh(self.body(x))
        return self.head(x) if whole else x


class Trainer:
    def __init__(self):
        self.model = DistributedDataParallel(Net(), find_unused_parameters=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, x):
        features = self.model(x)  # twin: output = self.model(x, whole=True)
        output = self.model.module.head(features)  # <- cause  # twin: pass
        loss = output.square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


dist.init_process_group("gloo")
trainer = Trainer()
for _ in range(5):
    trainer.step(torch.randn(3, 4))
dist.barrier()
dist.destroy_process_group()
