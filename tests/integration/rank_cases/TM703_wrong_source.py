# ranks: 3  culprit: 2
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
leader = 1 if rank == 2 else 0  # twin: leader = 0
for step in range(5):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    threshold = torch.tensor([0.5])
    dist.broadcast(threshold, leader)  # <- cause
dist.barrier()
dist.destroy_process_group()
