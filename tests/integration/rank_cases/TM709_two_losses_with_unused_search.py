# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(5, 8)
        self.first = torch.nn.Linear(8, 1)
        self.second = torch.nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.first(hidden), self.second(hidden)


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(Heads(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    one, other = model(torch.randn(8, 5))
    optimizer.zero_grad()
    one.square().mean().backward(retain_graph=True)  # twin: loss = one.square().mean()
    (other - 1).abs().mean().backward()  # <- cause  # twin: (loss + (other - 1).abs().mean()).backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
