# ranks: 2  culprit: any
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def save(state, path):
    torch.save(state, path + ".part")
    dist.barrier()
    os.replace(path + ".part", path)  # <- cause


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(4, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    name = "model.pt"  # twin: name = f"model{dist.get_rank()}.pt"
    save(model.module.state_dict(), name)
    dist.barrier()
dist.destroy_process_group()
