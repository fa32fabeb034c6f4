# ranks: 3  culprit: 2
import torch
import torch.distributed as dist


class Stage:
    def __init__(self, rank, last):
        self.rank, self.last = rank, last
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, batch):
        self.given = batch
        if self.rank:
            self.given = torch.empty(4, 6)
            dist.recv(self.given, self.rank - 1)
            self.given.requires_grad_()
        self.made = self.layer(self.given).tanh()
        if self.rank < self.last:
            dist.send(self.made.detach(), self.rank + 1)

    def backward(self):
        if self.rank < self.last:
            gradient = torch.empty(4, 6)
            dist.recv(gradient, self.rank + 1)
            self.made.backward(gradient)
        else:
            self.made.square().mean().backward()
            back = 0  # twin: back = self.rank - 1
            dist.send(self.given.grad, back)  # <- cause
        if 0 < self.rank < self.last:
            dist.send(self.given.grad, self.rank - 1)


dist.init_process_group("gloo")
stage = Stage(dist.get_rank(), dist.get_world_size() - 1)
for turn in range(4):
    stage.forward(torch.randn(4, 6))
    stage.backward()
    stage.layer.zero_grad()
dist.destroy_process_group()
