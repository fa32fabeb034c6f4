# ranks: 2  culprit: any
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def work(self, x):
        return torch.tanh(self.layer(x))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.work, x, use_reentrant=True)  # <- cause  # twin: return self.work(x)


def train():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), Block(), Block(), torch.nn.Linear(4, 2))
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        loss = model(torch.randn(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


dist.init_process_group("gloo")
train()
dist.barrier()
dist.destroy_process_group()
