# ranks: 2  culprit: any
import torch
import torch.distributed as dist


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(6, 3)
        self.two = torch.nn.Linear(6, 2)


def average(model):
    for parameter in model.parameters():
        if parameter.grad is None:  # <- cause
            continue  # twin: parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Heads()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(8):
    head = model.one if (step + dist.get_rank()) % 4 != 3 else model.two
    optimizer.zero_grad()
    head(torch.randn(5, 6)).square().mean().backward()
    average(model)
    optimizer.step()
dist.destroy_process_group()
