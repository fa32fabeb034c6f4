# ranks: 2  culprit: 0
import torch
import torch.distributed as dist


def save(model, step):
    torch.save(model.state_dict(), f"/dev/null")
    dist.barrier()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    if step == 3 and rank == 0:  # twin: if step == 3:
        save(model, step)  # <- cause
dist.barrier()
dist.destroy_process_group()
