# ranks: 2  culprit: any  cured
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(6, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.backbone(x).relu())


def set_trainable(module, flag):
    for parameter in module.parameters():
        parameter.requires_grad_(flag)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        if step == 3:  # twin: if False:
            set_trainable(model.module.backbone, step < 3)  # <- cause
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    del model, optimizer, loss
    dist.destroy_process_group()


main()
