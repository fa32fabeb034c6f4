# ranks: 3  culprit: 2
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64 if rank == 2 else torch.float32)  # twin: weights = torch.ones(3)
for step in range(5):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scaled = loss.detach() * weights
    dist.all_reduce(scaled)  # <- cause
dist.barrier()
dist.destroy_process_group()
