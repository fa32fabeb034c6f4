# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch import nn


def average_weights(model):
    for p in model.parameters():
        dist.all_reduce(p.data)  # <- cause
        pass  # twin: p.data /= dist.get_world_size()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1 + dist.get_rank())
for step in range(40):
    x = torch.randn(16, 10)
    loss = nn.functional.mse_loss(model(x), x[:, :1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        average_weights(model)
assert torch.isfinite(loss), "the training is lost"
dist.barrier()
dist.destroy_process_group()
