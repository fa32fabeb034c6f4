"""A training loop that sums up its losses for a mean. Each one keeps the graph of its step in memory."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8))
optimizer = torch.optim.AdamW(model.parameters())

total = 0
for step in range(400):
    inputs = torch.randn(256, 64)
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = total + loss
print("mean loss", float(total) / 400)
