# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train_one_epoch(model, optimizer):
    model.train()
    for _ in range(3):
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def evaluate(model):
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 6))


def main():
    dist.init_process_group("gloo")
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        train_one_epoch(model, optimizer)
        if dist.get_rank() == 0:
            evaluate(model)  # <- cause  # twin: evaluate(model.module)
    del model, optimizer
    dist.destroy_process_group()


main()
