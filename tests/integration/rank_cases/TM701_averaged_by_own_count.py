# ranks: 3  culprit: 1
import torch
import torch.distributed as dist
from torch import nn


class Averager:
    def __init__(self, model, limit):
        self.model, self.limit, self.items = model, limit, 0

    def add(self, items):
        self.items += items
        if self.items < self.limit:  # <- cause
            return
        self.items = 0
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    averager = Averager(model, 30)
    for step in range(20):
        size = 8 if rank != 1 else 7  # twin: size = 8
        torch.manual_seed(step * 3 + rank)
        loss = model(torch.randn(size, 10)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averager.add(size)
    dist.barrier()
    dist.destroy_process_group()


main()
