# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    for part in model[1:3]:
        fully_shard(part)
    return fully_shard(model)


def step(model, inputs):
    loss = model(inputs).square().mean() / 2
    if loss.item() > 1000:  # <- cause
        return False
    loss.backward()
    return True


dist.init_process_group("gloo")
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
draws = torch.Generator().manual_seed(dist.get_rank())
for number in range(1, 13):
    scale = 1e4 if number == 5 and dist.get_rank() == 0 else 1.0  # twin: scale = 1.0
    step(model, torch.randn(4, 6, generator=draws) * scale)
    if number % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
