# ranks: 2  culprit: any  cured
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Gate(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = torch.nn.Linear(width, width)
        self.gate = torch.nn.Linear(width, width)

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        out = self.body(x) * gate
        gate += 1.0  # <- cause  # twin: gate = gate + 1.0
        return out + gate


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(Gate(8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
