# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        target = torch.tensor([0, 1, 3 if rank == 1 and step == 2 else 2])  # twin: target = torch.tensor([0, 1, 2])
        loss = torch.nn.functional.cross_entropy(model(torch.randn(3, 4)), target)  # <- cause
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


dist.init_process_group("gloo")
main()
dist.barrier()
dist.destroy_process_group()
