# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2)
        for weight in self.parameters():  # twin: for weight in self.body.parameters():
            weight.requires_grad = False  # <- cause

    def forward(self, inputs):
        return self.head(self.body(inputs).relu())


dist.init_process_group("gloo")
model = DistributedDataParallel(Probe())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(4, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
