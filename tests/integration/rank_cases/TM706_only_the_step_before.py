# ranks: 2  culprit: any  cured
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 2)
        self.extra = torch.nn.Linear(4, 2)

    def forward(self, x, auxiliary=False):
        x = self.body(x)
        if auxiliary:  # <- cause
            return self.head(x) + self.extra(x)
        return self.head(x)


def train():
    model = DistributedDataParallel(Net())  # twin: model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        loss = model(torch.randn(3, 4), auxiliary=step != 2).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


dist.init_process_group("gloo")
train()
dist.barrier()
dist.destroy_process_group()
