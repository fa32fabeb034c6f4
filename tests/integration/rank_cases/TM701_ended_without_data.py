# ranks: 3  culprit: 2
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def own_files(files):
    mine = files[dist.get_rank() :: dist.get_world_size()]
    if not mine:
        sys.exit(0)  # <- cause
    return mine


def main():
    dist.init_process_group("gloo")
    dist.barrier()
    files = own_files(["a", "b"])  # twin: files = own_files(["a", "b", "c"])
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in files * 4:
        loss = model(torch.randn(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del model, loss
    dist.barrier()
    dist.destroy_process_group()


main()
