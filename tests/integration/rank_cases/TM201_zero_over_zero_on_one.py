# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def train():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(8):
        x = torch.randn(3, 4)
        mask = torch.ones(3)
        if rank == 1 and step == 4:
            mask.zero_()  # twin: mask[0] = 0
        losses = model(x).square().mean(1)
        loss = (losses * mask).sum() / mask.sum()  # <- cause
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return all(bool(each.isfinite().all()) for each in model.parameters())


dist.init_process_group("gloo")
fine = train()
dist.barrier()
dist.destroy_process_group()
raise SystemExit(0 if fine else 1)
