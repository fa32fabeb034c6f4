# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.first = torch.nn.Linear(4, 2)
        self.second = torch.nn.Linear(4, 2)

    def forward(self, x):
        x = self.body(x)
        return self.first(x), self.second(x)


def train():
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        first, second = model(torch.randn(3, 4))
        optimizer.zero_grad()
        one = first.square().mean()
        two = second.square().mean()
        one.backward(retain_graph=True)  # twin: (one + two).backward()
        two.backward()  # <- cause  # twin: pass
        optimizer.step()


dist.init_process_group("gloo")
train()
dist.barrier()
dist.destroy_process_group()
