# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(self, x):
        if len(x) < 3:  # <- cause  # twin: if len(x) < 1:
            return None
        loss = self.model(x).square().mean()
        if loss > 1e6:
            return None
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


dist.init_process_group("gloo")
trainer = Trainer(DistributedDataParallel(torch.nn.Linear(4, 1)))
sizes = [4, 6, 4, 5, 4, 4]
if dist.get_rank() == 1:
    sizes[3] = 2
for size in sizes:
    trainer.step(torch.randn(size, 4))
dist.barrier()
dist.destroy_process_group()
