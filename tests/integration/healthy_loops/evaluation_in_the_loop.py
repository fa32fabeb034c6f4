"""Every few steps the model is evaluated on a fixed batch, and put back."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())
probe = torch.randn(64, 10)
for step in range(30):
    model.train()
    optimizer.zero_grad()
    model(torch.randn(16, 10)).square().mean().backward()
    optimizer.step()
    if step % 5 == 4:
        model.eval()
        with torch.no_grad():
            model(probe)
