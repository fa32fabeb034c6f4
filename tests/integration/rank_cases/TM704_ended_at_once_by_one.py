# ranks: 2  culprit: 1
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(12):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 4)).square().mean()
    loss.backward()
    optimizer.step()
    if step == 6 + 20 * (1 - dist.get_rank()):  # twin: if step == 26:
        os._exit(0)  # <- cause
dist.barrier()
del model, loss
dist.destroy_process_group()
