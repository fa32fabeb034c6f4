"""A schedule that moves with every batch, on purpose."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=48)
for epoch in range(4):
    for step in range(12):
        optimizer.zero_grad()
        model(torch.randn(16, 10)).square().mean().backward()
        optimizer.step()
        schedule.step()
