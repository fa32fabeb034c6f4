# ranks: 2  culprit: 1
import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
count = 18 if dist.get_rank() == 1 else 21  # twin: count = 21
for epoch in range(2):
    for number, batch in enumerate(torch.randn(count, 4, 4).unbind(), 1):  # <- cause
        is_last = number % 4 == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = model(batch).square().mean() / 4
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
