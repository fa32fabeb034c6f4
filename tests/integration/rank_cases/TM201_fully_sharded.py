# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x):
        peak = x.abs().amax(-1, keepdim=True)
        return self.layer(x / peak)  # <- cause  # twin: return self.layer(x / (peak + 1e-6))


dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), Scale(), torch.nn.Linear(16, 4))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
torch.manual_seed(dist.get_rank())
for step in range(5):
    batch = torch.randn(4, 8)
    if step == 3 and dist.get_rank() == 1:
        batch[2] = 0.0
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not torch.isfinite(loss):
        raise SystemExit(1)
dist.barrier()
dist.destroy_process_group()
