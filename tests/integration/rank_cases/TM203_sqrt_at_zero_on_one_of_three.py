# ranks: 3  culprit: 2
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def distance(a, b):
    return (a - b).square().sum(1).sqrt()  # <- cause


def train():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(8):
        left, right = torch.randn(3, 4), torch.randn(3, 4)
        if rank == 2 and step == 3:
            right[1] = left[1]  # twin: right[1] = -left[1]
        first, second = model(torch.cat([left, right])).chunk(2)
        loss = distance(first, second).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return all(bool(each.isfinite().all()) for each in model.parameters())


dist.init_process_group("gloo")
fine = train()
dist.barrier()
dist.destroy_process_group()
raise SystemExit(0 if fine else 1)
