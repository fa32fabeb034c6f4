# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.rank = dist.get_rank()

    def save(self, step):
        state = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.rank == 0:
            torch.save(state, f"step{step}.pt")

    def fit(self, steps):
        for step in range(steps):
            loss = self.model(torch.randn(4, 8)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step % 4 == 3:
                if self.rank == 0:  # twin: if True:
                    self.save(step)  # <- cause


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3)).fit(9)
    dist.barrier()
    dist.destroy_process_group()


main()
