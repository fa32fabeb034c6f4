# ranks: 2  culprit: any  cured
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.main, self.extra = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x, with_extra):
        h = torch.relu(self.stem(x))
        if with_extra:  # <- cause
            return self.main(h) + self.extra(h)
        return self.main(h)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        torch.manual_seed(step * 2 + dist.get_rank())
        out = model(torch.randn(8, 8), step < 5)  # twin: out = model(torch.randn(8, 8), True)
        loss = nn.functional.cross_entropy(out, torch.randint(0, 4, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    del model, optimizer
    dist.destroy_process_group()


main()
