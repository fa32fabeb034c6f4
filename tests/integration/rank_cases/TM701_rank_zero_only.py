# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.nn.parallel import DistributedDataParallel


@rank_zero_only  # twin: # on all ranks
def report(seen):
    dist.all_reduce(seen)  # <- cause


def main():
    dist.init_process_group("gloo")
    rank_zero_only.rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
        report(torch.ones(1))
    dist.barrier()
    del model, optimizer
    dist.destroy_process_group()


main()
