# ranks: 3  culprit: 0
import torch
import torch.distributed as dist


def average(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def is_main():
    return dist.get_rank() == 0


dist.init_process_group("gloo")
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    loss = model(torch.randn(3, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat)
    optimizer.step()
    if step % 4 == 3:
        if is_main():  # twin: if True:
            print("loss", average(loss).item())  # <- cause
    dist.barrier()
dist.destroy_process_group()
