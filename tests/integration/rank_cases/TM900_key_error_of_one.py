# ranks: 3  culprit: 2
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WEIGHTS = {"cat": 1.0, "dog": 2.0}


def weight_of(name):
    return WEIGHTS[name]  # <- cause


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        name = "bird" if rank == 2 and step == 4 else "cat"  # twin: name = "cat"
        loss = model(torch.randn(4, 4)).square().mean() * weight_of(name)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    del model, optimizer, loss
    dist.destroy_process_group()


main()
