# ranks: 2  culprit: any  cured
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = torch.nn.Linear(4, 8)
        self.classes = torch.nn.Linear(8, 3)
        self.boxes = torch.nn.Linear(8, 4)

    def forward(self, x):
        x = self.trunk(x).relu()
        return self.classes(x), self.boxes(x)  # <- cause


def main():
    model = DistributedDataParallel(TwoHeads())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        classes, boxes = model(torch.randn(3, 4))
        loss = classes.square().mean()  # twin: loss = classes.square().mean() + boxes.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


dist.init_process_group("gloo")
main()
dist.barrier()
dist.destroy_process_group()
