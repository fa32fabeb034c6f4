# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train():
    rank = dist.get_rank()
    items = list(range(13))
    mine = items[rank::2]  # twin: mine = items[rank:12:2]
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for item in mine:  # <- cause
        loss = model(torch.full((3, 4), item / 10)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


dist.init_process_group("gloo")
train()
dist.barrier()
dist.destroy_process_group()
