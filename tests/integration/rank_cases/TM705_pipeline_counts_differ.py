# ranks: 2  culprit: 1
import torch
import torch.distributed as dist


def first(micro_batches):
    layer = torch.nn.Linear(4, 4)
    for _ in range(micro_batches):
        dist.send(layer(torch.randn(2, 4)).detach(), 1)


def second(micro_batches):
    layer = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(micro_batches):  # <- cause
        hidden = torch.empty(2, 4)
        dist.recv(hidden, 0)
        loss = layer(hidden).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    first(6)
else:
    second(8)  # twin: second(6)
dist.barrier()
dist.destroy_process_group()
