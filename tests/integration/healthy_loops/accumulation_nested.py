"""Accumulation: micro-batches in an inner loop, cleared before it."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(16):
    optimizer.zero_grad(set_to_none=False)
    x, y = torch.randn(32, 10), torch.randn(32, 1)
    for part, target in zip(x.chunk(4), y.chunk(4)):
        (nn.functional.mse_loss(model(part), target) * len(part) / len(x)).backward()
    optimizer.step()
