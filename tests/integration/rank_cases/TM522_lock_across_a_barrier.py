# ranks: 2  culprit: any
import fcntl
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def prepare(rank, step):
    """One rank builds the index, the others read it."""
    if rank == 1:
        time.sleep(0.3)
    with open("index.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # <- cause
        if step == 4:  # twin: if step == 99:
            dist.barrier()
        fcntl.flock(file, fcntl.LOCK_UN)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        if step % 4 == 0:
            prepare(rank, step)
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    del model, optimizer, loss
    dist.destroy_process_group()


main()
