"""An optimizer of its own for every layer."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
optimizers = [torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()]
for step in range(20):
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.randn(16, 10)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
