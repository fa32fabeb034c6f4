# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Distiller(nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        self.student = nn.Linear(8, 4)
        self.teacher.eval()
        pass  # twin: self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)  # <- cause
        return (self.student(x) - target).square().mean()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Distiller())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        loss = model(torch.randn(4, 8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    del model, loss
    dist.destroy_process_group()


main()
