# ranks: 2  culprit: any  cured
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, chosen):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():  # <- cause  # twin: if True:
                out[mine] = expert(x[mine])
        return out


dist.init_process_group("gloo")
model = DistributedDataParallel(Experts())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(4):
    x = torch.randn(3, 6)
    loss = (model(x, torch.tensor([0, 2, 3])) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
