"""A residual block that writes into a tensor which backward still needs."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        gate = torch.sigmoid(self.linear(x))
        out = gate * x
        gate += x
        return out + gate


torch.manual_seed(0)
model = nn.Sequential(Block(), Block(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters())

for step in range(100):
    inputs = torch.randn(64, 32)
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
