# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        loss = model(torch.randn(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if rank == 1 and step == 3:  # twin: if step == 3:
            dist.all_reduce(loss.detach())  # <- cause
        optimizer.step()


dist.init_process_group("gloo")
main()
dist.barrier()
dist.destroy_process_group()
