# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch import nn


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # <- cause
        parameter.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(6, 8), "depth": nn.Linear(8, 1), "kind": nn.Linear(8, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        torch.manual_seed(step * 2 + dist.get_rank())
        h = torch.relu(model["body"](torch.randn(4, 6)))
        loss = model["depth"](h).square().mean()
        if dist.get_rank() == 0 or step != 5:  # twin: if True:
            loss = loss + model["kind"](h).square().mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


main()
