# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Patience:
    def __init__(self, limit):
        self.best, self.bad, self.limit = float("inf"), 0, limit

    def is_over(self, value):
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = min(self.best, value)
        return self.bad >= self.limit


def validation(epoch):
    own = -float(epoch) if dist.get_rank() == 0 else 0.5 * epoch
    value = torch.tensor([own])
    dist.reduce(value, 0)  # twin: dist.all_reduce(value)
    return value.item()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
patience = Patience(2)
for epoch in range(6):
    for batch in torch.randn(4, 8, 4):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if patience.is_over(validation(epoch)):  # <- cause
        break
dist.barrier()
dist.destroy_process_group()
