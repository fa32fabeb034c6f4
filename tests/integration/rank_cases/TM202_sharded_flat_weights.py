# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(x).tanh()


def entropy(p):
    return -(p * p.log()).sum(-1).mean()  # <- cause


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 3))
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(6):
        x = torch.randn(4, 8)
        if step == 4 and dist.get_rank() == 1:  # twin: if False:
            x[2] *= 1e4
        loss = entropy(model(x).softmax(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    fine = all(bool(each.isfinite().all()) for each in model.parameters())
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(0 if fine else 1)


main()
