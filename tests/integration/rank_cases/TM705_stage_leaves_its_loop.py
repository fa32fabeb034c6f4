# ranks: 3  culprit: 2
import torch
import torch.distributed as dist


class Stage:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.layer = torch.nn.Linear(4, 4)
        self.kept = []

    def forward(self):
        x = torch.randn(2, 4)
        if self.rank > 0:
            dist.recv(x, self.rank - 1)
        x.requires_grad_()
        y = self.layer(x)
        self.kept.append((x, y))
        if self.rank + 1 < self.world:
            dist.send(y.detach(), self.rank + 1)

    def backward(self):
        x, y = self.kept.pop(0)
        gradient = torch.ones_like(y)
        if self.rank + 1 < self.world:
            dist.recv(gradient, self.rank + 1)
        y.backward(gradient)
        if self.rank > 0:
            dist.send(x.grad, self.rank - 1)


dist.init_process_group("gloo")
stage = Stage(dist.get_rank(), dist.get_world_size())
for step in range(4):
    turns = 3 if step == 3 and stage.rank == 2 else 4  # twin: turns = 4
    for _ in range(turns):  # <- cause
        stage.forward()
    for _ in range(turns):
        stage.backward()
dist.destroy_process_group()
