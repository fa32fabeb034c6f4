# ranks: 2
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train():
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        inputs = torch.randn(8, 4)
        model.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        if dist.get_rank() == 0:
            optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)


dist.init_process_group("gloo")
train()
dist.barrier()
dist.destroy_process_group()
