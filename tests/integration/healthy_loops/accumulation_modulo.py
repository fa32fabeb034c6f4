"""Accumulation: loss divided, cleared after the update, an incomplete cycle at the end of the epoch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

loader = DataLoader(TensorDataset(torch.randn(88, 10), torch.randn(88, 1)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(4):
    for step, (x, y) in enumerate(loader):
        loss = (model(x) - y).square().mean() / 4
        loss.backward()
        if (step + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
