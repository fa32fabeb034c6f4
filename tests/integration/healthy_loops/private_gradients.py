"""DP-SGD by hand: gradients per sample are cleared, clipped and summed up outside of .grad."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(12):
    x, y = torch.randn(4, 10), torch.randn(4, 1)
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for row, target in zip(x, y):
        optimizer.zero_grad()
        (model(row) - target).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part, parameter in zip(total, model.parameters()):
            part += parameter.grad
    for part, parameter in zip(total, model.parameters()):
        parameter.grad = (part + 0.1 * torch.randn_like(part)) / 4
    optimizer.step()
