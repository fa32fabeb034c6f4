# ranks: 3  culprit: any
import torch
import torch.distributed as dist


def neighbours():
    rank, world = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % world, (rank - 1) % world


def mixed(mine):
    right, left = neighbours()
    theirs = torch.empty_like(mine)
    if dist.get_rank() == -1:  # twin: if dist.get_rank() == 0:
        dist.recv(theirs, left)
        dist.send(mine, right)
    else:
        dist.send(mine, right)  # <- cause
        dist.recv(theirs, left)
    return (mine + theirs) / 2


dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    loss = model(torch.randn(8, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.weight.copy_(mixed(model.weight.detach().clone()))
dist.barrier()
dist.destroy_process_group()
