# ranks: 2  culprit: any
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sizes = {"loss": 1, "hits": 4}
names = ["loss", "hits"] if rank == 0 else ["hits", "loss"]  # twin: names = ["loss", "hits"]
for step in range(3):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for name in names:
        dist.all_reduce(torch.zeros(sizes[name]))  # <- cause
dist.barrier()
dist.destroy_process_group()
