# ranks: 2  culprit: 1
import threading

import torch
import torch.distributed as dist

lock = threading.Lock()


def record(value):
    with lock:
        note(value)


def note(value):
    with lock:  # <- cause  # twin: if value is not None:
        print(value)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    if rank == 1 and step == 3:
        record(loss.item())
dist.barrier()
dist.destroy_process_group()
