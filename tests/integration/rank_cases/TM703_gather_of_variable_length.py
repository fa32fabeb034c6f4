# ranks: 4  culprit: 3
import torch
import torch.distributed as dist


def gather(values):
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)  # <- cause
    return torch.cat(parts)


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
kept = torch.arange(10.0)
kept = kept[kept > 3] if rank == 3 else kept  # twin: kept = kept[kept > 3]
gather(kept)
dist.barrier()
dist.destroy_process_group()
