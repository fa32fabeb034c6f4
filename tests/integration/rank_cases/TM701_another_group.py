# ranks: 4  culprit: 3
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Pair:
    """Two ranks that share a model; the two pairs train different models."""

    def __init__(self):
        self.rank = dist.get_rank()
        self.groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.own = self.groups[self.rank // 2]
        torch.manual_seed(self.rank // 2)
        self.model = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=self.own)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self):
        loss = self.model(torch.randn(8, 4)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def report(self):
        index = 0 if self.rank == 3 else self.rank // 2  # twin: index = self.rank // 2
        total = torch.ones(1)
        dist.all_reduce(total, group=self.groups[index])  # <- cause


def main():
    dist.init_process_group("gloo")
    pair = Pair()
    for _ in range(4):
        pair.step()
    pair.report()
    dist.barrier()
    del pair
    dist.destroy_process_group()


main()
