# ranks: 2  culprit: 0
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def load(path):
    rank = dist.get_rank()
    if rank != 0:
        dist.barrier()  # rank 0 builds the file
    if os.path.exists(path):  # <- cause  # twin: if not path:
        return torch.load(path)
    if rank == 0:
        torch.save(torch.randn(32, 4), path)
        dist.barrier()
    return torch.load(path)


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    torch.save(torch.randn(32, 4), "data.pt")
dist.barrier()
data = load("data.pt")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in data.split(4):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
