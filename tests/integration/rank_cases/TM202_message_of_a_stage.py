# ranks: 2  culprit: 0
import torch
import torch.distributed as dist


def front(net, x):
    scaled = torch.log(x.abs().amin(1, keepdim=True)) * x  # <- cause  # twin: scaled = x
    h = torch.tanh(net(scaled))
    dist.send(h.detach(), 1)
    back = torch.zeros_like(h)
    dist.recv(back, 1)
    h.backward(back)


def rear(net, y):
    h = torch.empty(8, 12)
    dist.recv(h, 0)
    h.requires_grad_(True)
    loss = (net(h) - y).square().mean()
    loss.backward()
    dist.send(h.grad, 0)


dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
net = torch.nn.Linear(6, 12) if rank == 0 else torch.nn.Linear(12, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
for step in range(10):
    x = torch.randn(8, 6)
    if step == 6:
        x[2] = 0.0
    optimizer.zero_grad()
    if rank == 0:
        front(net, x)
    else:
        rear(net, 1.0)
    optimizer.step()
dist.barrier()
assert all(each.isfinite().all() for each in net.parameters())
dist.destroy_process_group()
