"""Gradients per batch are read and cleared (Fisher information), then training goes on."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters())
for task in range(3):
    fisher = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for step in range(8):
        model.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 10)), torch.randint(0, 3, (8,))).backward()
        fisher = [old + parameter.grad.square() for old, parameter in zip(fisher, model.parameters())]
    for step in range(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 10)), torch.randint(0, 3, (8,))).backward()
        optimizer.step()
