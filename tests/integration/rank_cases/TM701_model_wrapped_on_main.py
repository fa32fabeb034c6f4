# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def train(model):
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()


if rank == 0:  # twin: if True:
    train(model)  # <- cause
score = torch.full((1,), 16)
scores = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
dist.all_gather(scores, score)
dist.destroy_process_group()
