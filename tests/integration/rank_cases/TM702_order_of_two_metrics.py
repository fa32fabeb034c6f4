# ranks: 2  culprit: 1
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 1 and step == 3:  # twin: if False:
        table = torch.zeros(8)
        dist.broadcast(table, 0)  # <- cause
        dist.all_reduce(loss.detach())
    else:
        dist.all_reduce(loss.detach())
        table = torch.zeros(8)
        dist.broadcast(table, 0)
dist.destroy_process_group()
