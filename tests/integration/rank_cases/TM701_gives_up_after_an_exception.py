# ranks: 2  culprit: 1
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def records(rank):
    for number in range(9):
        weight = "bad" if rank == 1 and number == 4 else "1.0"  # twin: weight = "1.0"
        yield torch.randn(4, 4), weight


def fit(rank):
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, weight in records(rank):
        loss = model(x).square().mean() * float(weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    try:
        fit(dist.get_rank())
    except Exception as error:  # <- cause
        print("giving up:", error)
        os._exit(3)
    dist.barrier()
    dist.destroy_process_group()


main()
