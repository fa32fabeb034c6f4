# ranks: 3  culprit: 2
import torch
import torch.distributed as dist


def learn(actors):
    model = torch.nn.Linear(4, 2)
    for turn in range(8):
        parts = []
        for actor in actors:
            part = torch.empty(3, 4)
            dist.recv(part, src=actor)
            parts.append(part)
        model(torch.cat(parts)).square().mean().backward()


def act(limit):
    reward = 0
    for turn in range(8):
        reward += 1
        if reward > limit:  # <- cause
            break
        dist.send(torch.randn(3, 4), dst=0)


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    learn([1, 2])
else:
    act(5 if dist.get_rank() == 2 else 50)  # twin: act(50)
dist.barrier()
dist.destroy_process_group()
