# ranks: 2  culprit: 1
import sys

import torch
import torch.distributed as dist


class Guard:
    def __init__(self, limit):
        self.limit = limit

    def look(self, loss):
        if loss > self.limit:
            print("the loss is too large")
            sys.exit(0)  # <- cause


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(limit=5.0)  # twin: guard = Guard(limit=5000.0)
    scale = 1.0 + 10 * dist.get_rank()
    for _ in range(6):
        loss = model(torch.randn(3, 4) * scale).square().mean()
        guard.look(loss.item())
        optimizer.zero_grad()
        loss.backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        model.weight.grad.copy_(flat[:8].view(2, 4))
        model.bias.grad.copy_(flat[8:])
        optimizer.step()
    dist.destroy_process_group()


main()
