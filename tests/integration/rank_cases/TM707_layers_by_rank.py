# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    layers = [torch.nn.Linear(4, 4) for _ in range(2 + dist.get_rank())]  # twin: layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))  # <- cause
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = model(torch.randn(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


dist.init_process_group("gloo")
main()
dist.barrier()
dist.destroy_process_group()
