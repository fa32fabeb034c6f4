# ranks: 2  culprit: 1
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def check(x):
    if x.abs().max() > 1e6:
        print("bad batch, giving up")
        sys.exit(0)  # <- cause


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(9):
        x = torch.randn(4, 4)
        if rank == 1 and step == 4:  # twin: if rank == 7:
            x = x * 1e9
        check(x)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    del model, optimizer, loss
    dist.destroy_process_group()


main()
