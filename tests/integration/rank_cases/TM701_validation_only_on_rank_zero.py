# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Metric:
    def __init__(self):
        self.total = torch.zeros(1)

    def update(self, value):
        self.total += value

    def compute(self):
        dist.all_reduce(self.total)
        return self.total / dist.get_world_size()


@torch.no_grad()
def validate(model):
    metric = Metric()
    for _ in range(3):
        metric.update(model(torch.randn(2, 4)).mean().item())
    return metric.compute()


def main():
    model = DistributedDataParallel(torch.nn.Linear(4, 2), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        for _ in range(3):
            loss = model(torch.randn(3, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:  # twin: if epoch >= 0:
            validate(model.module)  # <- cause


dist.init_process_group("gloo")
main()
dist.barrier()
dist.destroy_process_group()
