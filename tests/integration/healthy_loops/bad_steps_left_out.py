"""A step whose loss looks bad is left out; its gradients go when the next step clears them."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(80):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 10)).square().mean()
    loss.backward()
    if torch.rand(()) < 0.5:
        continue
    optimizer.step()
