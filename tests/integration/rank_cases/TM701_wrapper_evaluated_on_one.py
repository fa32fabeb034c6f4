# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


@torch.no_grad()
def evaluate(model, batches):
    losses = [model(x).square().mean().item() for x in batches]
    return sum(losses) / len(losses)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    held_out = [torch.randn(4, 1, 8, 8) for _ in range(3)]
    for epoch in range(3):
        model.train()
        for _ in range(4):
            loss = model(torch.randn(4, 1, 8, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            model.train()
            score = evaluate(model, held_out)  # <- cause  # twin: score = evaluate(model.module, held_out)
            print(f"{epoch} {score:.3f}")
    dist.barrier()
    del model, optimizer, loss
    dist.destroy_process_group()


main()
