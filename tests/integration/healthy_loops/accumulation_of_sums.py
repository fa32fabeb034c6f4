"""Accumulation of a loss that is a sum: there is nothing to divide."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for step in range(48):
    x, y = torch.randn(8, 10), torch.randn(8, 1)
    (model(x) - y).square().sum().backward()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
