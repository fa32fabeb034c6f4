# ranks: 3  culprit: 2
import torch
import torch.distributed as dist

MICRO = 4


class Stage:
    def __init__(self, rank, last):
        self.rank, self.last = rank, last
        self.layer = torch.nn.Linear(6, 6)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.01)

    def forward(self):
        if self.rank == 0:
            x = torch.randn(2, 6)
        else:
            x = torch.empty(2, 6)
            dist.recv(x, self.rank - 1)
            x.requires_grad_()
        y = self.layer(x).tanh()
        if not self.last:
            dist.send(y.detach(), self.rank + 1)
        return x, y

    def backward(self, x, y, number):
        if self.last:
            y.square().mean().backward()
        else:
            grad = torch.empty_like(y)
            dist.recv(grad, self.rank + 1)
            y.backward(grad)
        if self.rank > 0 and number + 1 < MICRO:  # twin: if self.rank > 0:
            dist.send(x.grad, self.rank - 1)  # <- cause


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = Stage(rank, rank == world - 1)
    for step in range(3):
        stage.optimizer.zero_grad()
        for number in range(MICRO):
            x, y = stage.forward()
            stage.backward(x, y, number)
        stage.optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


main()
