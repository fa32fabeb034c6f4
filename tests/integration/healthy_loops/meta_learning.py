"""Inner updates through autograd.grad, an outer update through backward."""

import torch
from torch import nn

torch.manual_seed(0)

from torch.func import functional_call

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(12):
    optimizer.zero_grad()
    for task in range(3):
        weights = dict(model.named_parameters())
        x, y = torch.randn(8, 4), torch.randn(8, 1)
        loss = nn.functional.mse_loss(functional_call(model, weights, (x,)), y)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        fast = {name: value - 0.1 * slope for (name, value), slope in zip(weights.items(), slopes)}
        (nn.functional.mse_loss(functional_call(model, fast, (x,)), y) / 3).backward()
    optimizer.step()
