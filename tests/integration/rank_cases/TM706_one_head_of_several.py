# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Detector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleDict({"box": torch.nn.Linear(8, 4), "mask": torch.nn.Linear(8, 6)})

    def forward(self, x, has_mask):
        loss = self.heads["box"](x).square().mean()
        if has_mask.any():  # <- cause  # twin: if True:
            loss = loss + self.heads["mask"](x[has_mask]).square().sum()
        return loss


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Detector())
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for step in range(8):
    x, has_mask = torch.randn(6, 8), torch.ones(6, dtype=torch.bool)
    if step == 3 and dist.get_rank() == 1:
        has_mask[:] = False
    loss = model(x, has_mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.barrier()
del model, optimizer, loss
dist.destroy_process_group()
