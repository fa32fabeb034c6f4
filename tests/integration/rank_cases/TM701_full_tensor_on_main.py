# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


class Monitor:
    def __init__(self, model):
        self.model, self.rows = model, []

    def note(self):
        norms = {name: p.full_tensor().norm().item() for name, p in self.model.named_parameters()}
        self.rows.append(norms)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = Monitor(model)
    for step in range(8):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            if dist.get_rank() == 0:  # twin: if step:
                monitor.note()  # <- cause
    dist.barrier()
    dist.destroy_process_group()


main()
