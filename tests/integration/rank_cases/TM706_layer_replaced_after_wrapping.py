# ranks: 2  culprit: any  cured
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Linear(6, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        return self.head(self.backbone(x).relu())


def replace_head(model, classes):
    model.head = nn.Linear(model.head.in_features, classes)  # <- cause


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Classifier(10)
    model = DistributedDataParallel(net)  # twin: replace_head(net, 2)
    replace_head(model.module, 2)  # twin: model = DistributedDataParallel(net)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    del model, optimizer, loss
    dist.destroy_process_group()


main()
