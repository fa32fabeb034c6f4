"""Gradients of two tasks, one after the other, combined by hand (PCGrad)."""

import torch
from torch import nn

torch.manual_seed(0)

body, heads = nn.Linear(10, 16), nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])
optimizer = torch.optim.SGD([*body.parameters(), *heads.parameters()], lr=0.01)
for step in range(20):
    x, found = torch.randn(16, 10), []
    for head in heads:
        optimizer.zero_grad()
        (head(torch.relu(body(x))) - 1).square().mean().backward()
        found.append([p.grad.clone() if p.grad is not None else None for p in body.parameters()])
    for parameter, one, other in zip(body.parameters(), *found):
        dot = (one * other).sum()
        parameter.grad = one + other - (dot / other.square().sum() * other if dot < 0 else 0)
    optimizer.step()
