"""No optimizer at all."""

import torch
from torch import nn

torch.manual_seed(0)

weight = torch.randn(10, 1, requires_grad=True)
for step in range(20):
    loss = (torch.randn(16, 10) @ weight).square().mean()
    loss.backward()
    with torch.no_grad():
        weight -= 0.01 * weight.grad
    weight.grad = None
