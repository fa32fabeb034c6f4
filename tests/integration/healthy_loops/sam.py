"""Sharpness-aware minimisation: two passes through one closure, the first gradients move the weights."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def gradients(x, y):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()


for step in range(30):
    x, y = torch.randn(16, 10), torch.randn(16, 1)
    gradients(x, y)
    moves = []
    with torch.no_grad():
        for parameter in model.parameters():
            moves.append(0.05 * parameter.grad / (parameter.grad.norm() + 1e-12))
            parameter.add_(moves[-1])
    optimizer.zero_grad()
    gradients(x, y)
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves):
            parameter.sub_(move)
    optimizer.step()
    optimizer.zero_grad()
