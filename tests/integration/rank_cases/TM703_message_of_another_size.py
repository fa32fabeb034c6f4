# ranks: 2  culprit: 1
import torch
import torch.distributed as dist


class First:
    def __init__(self):
        self.net = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def step(self, batch):
        hidden = self.net(batch)
        dist.send(hidden.detach(), 1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, 1)
        self.optimizer.zero_grad()
        hidden.backward(gradient)
        self.optimizer.step()


class Second:
    def __init__(self):
        self.net = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def step(self, batch):
        hidden = torch.zeros(8, 3)  # twin: hidden = torch.zeros(len(batch), 3)
        dist.recv(hidden, 0)  # <- cause
        hidden.requires_grad_()
        self.optimizer.zero_grad()
        self.net(hidden).square().mean().backward()
        self.optimizer.step()
        dist.send(hidden.grad, 0)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stage = First() if dist.get_rank() == 0 else Second()
    for batch in torch.randn(44, 4).split(8):
        stage.step(batch)
    dist.barrier()
    dist.destroy_process_group()


main()
