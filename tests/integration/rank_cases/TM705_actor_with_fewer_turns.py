# ranks: 3  culprit: 2
import torch
import torch.distributed as dist


def learn(turns):
    weight = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(turns):
        parts = [torch.empty(2, 4) for _ in range(1, dist.get_world_size())]
        for source, part in enumerate(parts, 1):
            dist.recv(part, src=source)
        loss = (torch.cat(parts) @ weight - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def act(turns):
    while turns:  # <- cause
        dist.send(torch.randn(2, 4), dst=0)
        turns -= 1


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    learn(6)
else:
    act(6 if dist.get_rank() == 1 else 4)  # twin: act(6)
dist.barrier()
dist.destroy_process_group()
