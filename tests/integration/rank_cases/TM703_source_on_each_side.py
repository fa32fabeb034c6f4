# ranks: 3  culprit: 0
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rate = torch.zeros(1)
if dist.get_rank() == 0:
    rate += 0.1
    dist.broadcast(rate, src=0)  # <- cause
else:
    dist.broadcast(rate, src=1)  # twin: dist.broadcast(rate, src=0)
weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=float(rate))
for _ in range(3):
    loss = (torch.ones(2, 4) @ weight - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
