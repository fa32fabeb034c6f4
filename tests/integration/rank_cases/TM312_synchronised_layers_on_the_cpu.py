# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def prepare(model):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) or model  # <- cause  # twin: model = model.float()
    return DistributedDataParallel(model)


dist.init_process_group("gloo")
model = prepare(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(4, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
