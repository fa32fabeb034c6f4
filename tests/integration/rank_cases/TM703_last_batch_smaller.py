# ranks: 2  culprit: 1
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(20 if rank == 0 else 18, 4)  # twin: data = torch.randn(20, 4)
for batch in data.split(5):
    out = model(batch)
    loss = out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    gathered = [torch.empty_like(out) for _ in range(2)]
    dist.all_gather(gathered, out.detach())  # <- cause
dist.barrier()
dist.destroy_process_group()
