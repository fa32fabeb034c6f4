# ranks: 3  culprit: 0
import torch
import torch.distributed as dist


def edges_of_others(field):
    rank, world = dist.get_rank(), dist.get_world_size()
    before, after = rank - 1, (rank + 1) % world  # twin: before, after = (rank - 1) % world, (rank + 1) % world
    from_before = torch.empty(1)
    calls = [dist.P2POp(dist.isend, field[-1:].clone(), after), dist.P2POp(dist.irecv, from_before, before)]
    for work in dist.batch_isend_irecv(calls):  # <- cause
        work.wait()
    return from_before


dist.init_process_group("gloo")
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(4):
    field = torch.randn(4)
    loss = model(torch.cat([edges_of_others(field), field])).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
