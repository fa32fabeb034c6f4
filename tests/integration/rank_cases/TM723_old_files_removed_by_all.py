# ranks: 2  culprit: any
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def keep_newest(count):
    found = sorted(Path().glob("step*.pt"))
    dist.barrier()
    for old in found[:-count]:
        old.unlink(missing_ok=False)  # <- cause  # twin: old.unlink(missing_ok=True)


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(4, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"step{step}.pt")
    dist.barrier()
    keep_newest(2)
dist.destroy_process_group()
