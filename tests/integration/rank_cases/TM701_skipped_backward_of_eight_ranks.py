# ranks: 8  culprit: 5
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        data = torch.ones(3, 4) * (100 if rank == 5 and step == 4 else 1)
        loss = model(data).square().mean()
        if loss > 20:  # <- cause  # twin: if loss > 1e9:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


dist.init_process_group("gloo")
train()
dist.barrier()
dist.destroy_process_group()
