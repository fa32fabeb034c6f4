# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel


def train():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model.register_comm_hook(None, fp16_compress_hook)  # <- cause  # twin: pass
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    for step in range(6):
        scale = 1e6 if step == 4 else 1.0
        loss = (model(torch.randn(3, 4)) * scale).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return all(bool(each.isfinite().all()) for each in model.parameters())


dist.init_process_group("gloo")
fine = train()
dist.barrier()
dist.destroy_process_group()
raise SystemExit(0 if fine else 1)
