# ranks: 3
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 2])
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        plan = torch.tensor([float(step)])
        dist.broadcast(plan, 0)
    else:
        plan = torch.empty(1)
        dist.broadcast(plan, 0)
    if rank != 1:
        dist.all_reduce(loss.detach(), group=pair)
    if rank == 1:
        dist.send(torch.ones(3), 2)
    elif rank == 2:
        dist.recv(torch.empty(3), 1)
    sizes = [torch.empty(1) for _ in range(3)] if rank == 0 else None
    dist.gather(torch.ones(1) * rank, sizes, 0)
dist.monitored_barrier()
dist.destroy_process_group()
