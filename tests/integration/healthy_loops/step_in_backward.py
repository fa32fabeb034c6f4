"""The update is made by a hook as soon as a gradient is there."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}


def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for step in range(20):
    model(torch.randn(16, 10)).square().mean().backward()
