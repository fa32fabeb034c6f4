# ranks: 2
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = model(torch.randn(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        end = time.monotonic() + 6
        while time.monotonic() < end:
            model.module(torch.randn(64, 4)).mean().item()
    dist.barrier()


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
