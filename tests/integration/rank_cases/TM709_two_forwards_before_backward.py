# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train():
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        left, right = torch.randn(3, 4), torch.randn(3, 4)
        first = model(left)
        second = model(right)  # <- cause
        optimizer.zero_grad()
        first.square().mean().backward()
        second.square().mean().backward()
        optimizer.step()


dist.init_process_group("gloo")
train()
dist.barrier()
dist.destroy_process_group()
