# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def build(mesh):
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 1))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = build(init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(8):
        length = 0 if rank == 1 and step == 5 else 4  # twin: length = 4
        x = torch.randn(length, 8)
        if not len(x):  # <- cause
            continue
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


main()
