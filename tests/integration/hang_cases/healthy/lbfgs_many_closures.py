"""One step of LBFGS calls its closure a thousand times."""

import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 1)
x, y = torch.randn(64, 8), torch.randn(64, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=30, tolerance_grad=0, tolerance_change=0)


def closure():
    time.sleep(0.15)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


optimizer.step(closure)
