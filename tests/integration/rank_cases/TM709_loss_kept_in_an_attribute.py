# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.score = torch.nn.Linear(4, 2)
        self.noise = torch.nn.Linear(4, 1)

    def forward(self, x):
        share = self.score(x).softmax(-1)
        self.balance = share.mean(0).square().sum() + self.noise(x).square().mean()  # <- cause
        return share


class Mixture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Gate()
        self.out = torch.nn.Linear(2, 1)

    def forward(self, x):
        y = self.out(self.gate(x))
        return y, None  # twin: return y, self.gate.balance


dist.init_process_group("gloo")
model = DistributedDataParallel(Mixture(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    y, balance = model(torch.randn(3, 4))
    balance = model.module.gate.balance  # twin: pass
    loss = y.square().mean() + 0.1 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
