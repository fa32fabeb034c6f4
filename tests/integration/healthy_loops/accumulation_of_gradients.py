"""Accumulation: the gradients are divided, not the loss, and the model clears them."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(48):
    x, y = torch.randn(8, 10), torch.randn(8, 1)
    nn.functional.mse_loss(model(x), y).backward()
    if step % 4 == 3:
        for parameter in model.parameters():
            parameter.grad /= 4
        optimizer.step()
        model.zero_grad()
