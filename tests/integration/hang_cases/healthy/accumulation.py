"""Thirty small backward calls for one update."""

import time

import torch
from torch import nn

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    time.sleep(0.1)
    loss = model(torch.randn(4, 8)).square().mean() / 30
    loss.backward()
    if step % 30 == 29:
        optimizer.step()
        optimizer.zero_grad()
