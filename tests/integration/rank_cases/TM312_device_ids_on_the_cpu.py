# ranks: 2  culprit: any
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
number = int(os.environ["LOCAL_RANK"])
ids = [number]  # twin: ids = [number] if torch.cuda.is_available() else None
model = DistributedDataParallel(torch.nn.Linear(4, 2), device_ids=ids)  # <- cause
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
