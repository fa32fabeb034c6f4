# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        x = checkpoint(self.inner, x, use_reentrant=True)  # <- cause  # twin: x = checkpoint(self.inner, x, use_reentrant=False)
        x = checkpoint(self.inner, x, use_reentrant=False)
        return self.head(x)


def train():
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        loss = model(torch.randn(3, 4, requires_grad=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


dist.init_process_group("gloo")
train()
dist.barrier()
dist.destroy_process_group()
