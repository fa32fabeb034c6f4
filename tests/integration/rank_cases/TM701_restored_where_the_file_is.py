# ranks: 2  culprit: 0
import os

import torch
import torch.distributed as dist


class Model:
    def __init__(self, rank):
        self.rank = rank
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.path = f"scratch{rank}/last.pt"
        os.makedirs(f"scratch{rank}", exist_ok=True)
        if rank == 0:  # twin: if True:
            torch.save(self.net.state_dict(), self.path)

    def restore(self):
        if os.path.exists(self.path):
            self.net.load_state_dict(torch.load(self.path))
            for parameter in self.net.parameters():
                dist.broadcast(parameter.data, 0)  # <- cause

    def step(self):
        self.optimizer.zero_grad()
        self.net(torch.randn(8, 4)).square().mean().backward()
        flat = torch.cat([p.grad.flatten() for p in self.net.parameters()])
        dist.all_reduce(flat)
        self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    model = Model(dist.get_rank())
    model.restore()
    for _ in range(5):
        model.step()
    dist.barrier()
    dist.destroy_process_group()


main()
