# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

LOSSES = {0: [3.0, 2.0, 2.5, 1.5], 1: [3.0, 2.0, 1.8, 1.5]}


def save_if_best(model, loss, best):
    if loss < best:
        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(model, options=options)  # <- cause
        if dist.get_rank() == 0:
            torch.save(state, "best.pt")
    return min(loss, best)


def epoch(model, optimizer, loader):
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    best, loader = float("inf"), [torch.randn(4, 8) for _ in range(3)]
    for number in range(4):
        epoch(model, optimizer, loader)
        loss = LOSSES[dist.get_rank()][number]  # twin: loss = LOSSES[0][number]
        best = save_if_best(model, loss, best)
    dist.destroy_process_group()


main()
