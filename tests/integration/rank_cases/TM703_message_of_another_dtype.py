# ranks: 2  culprit: 0
import torch
import torch.distributed as dist


def front(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sent = net(x)
    values = sent.detach()  # twin: values = sent.detach().float()
    dist.send(values, 1)  # <- cause
    back = torch.zeros(sent.shape)
    dist.recv(back, 1)
    sent.backward(back.to(sent.dtype))


def rear(net, y):
    taken = torch.zeros(8, 16)
    dist.recv(taken, 0)
    taken.requires_grad_()
    loss = (net(taken) - y).tanh().square().mean()
    loss.backward()
    dist.send(taken.grad, 0)
    return bool(taken.all())


dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
net = torch.nn.Linear(6, 16) if rank == 0 else torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
for step in range(40):
    x = torch.randn(8, 6)
    optimizer.zero_grad()
    if rank == 0:
        front(net, x)
    else:
        is_whole = rear(net, x[:, :1])
    optimizer.step()
dist.barrier()
assert rank == 0 or is_whole
dist.destroy_process_group()
