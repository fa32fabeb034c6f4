# ranks: 2  culprit: 1
import torch
import torch.distributed as dist


def first(turns):
    for _ in range(turns):
        dist.send(torch.ones(3), dst=1)
        dist.recv(torch.empty(3), src=1)


def second(turns):
    seen = 0
    while True:
        taken = torch.empty(3)
        dist.recv(taken, src=0)
        dist.send(taken, dst=0)
        seen += 1
        if seen == turns:  # <- cause
            break


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    first(6)
else:
    second(4)  # twin: second(6)
dist.destroy_process_group()
