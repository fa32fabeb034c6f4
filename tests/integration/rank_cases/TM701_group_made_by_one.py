# ranks: 2  culprit: 0
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())
if rank == 0:  # twin: if True:
    readers = dist.new_group([0, 1])  # <- cause
dist.barrier()
dist.destroy_process_group()
