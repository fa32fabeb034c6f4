# ranks: 2  culprit: 1
import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train():
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        loss = model(torch.randn(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 1 and step == 3:  # twin: if False:
            os.kill(os.getpid(), signal.SIGKILL)  # <- cause


dist.init_process_group("gloo")
train()
dist.barrier()
dist.destroy_process_group()
