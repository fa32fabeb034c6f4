# ranks: 2  culprit: any
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    other = torch.empty(4)
    if step < 3 and rank == 1:  # twin: if rank == 1:
        dist.send(model.bias.detach(), 1 - rank)
        dist.recv(other, 1 - rank)
    else:
        dist.recv(other, 1 - rank)  # <- cause
        dist.send(model.bias.detach(), 1 - rank)
dist.destroy_process_group()
