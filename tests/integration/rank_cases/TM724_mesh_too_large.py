# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SIZES = (2, 2)  # twin: SIZES = (1, 2)


def shard(model):
    mesh = init_device_mesh("cpu", SIZES, mesh_dim_names=("replicate", "shard"))  # <- cause
    return fully_shard(model, mesh=mesh)


dist.init_process_group("gloo")
model = shard(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(4, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
