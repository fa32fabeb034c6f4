"""LBFGS: backward is called inside of step, several times."""

import torch
from torch import nn

torch.manual_seed(0)

x, y = torch.randn(64, 10), torch.randn(64, 1)
model = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)


def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


for step in range(12):
    optimizer.step(closure)
