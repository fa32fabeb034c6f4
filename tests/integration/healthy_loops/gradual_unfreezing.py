"""One layer after the other is unfrozen and added to the optimizer."""

import torch
from torch import nn

torch.manual_seed(0)

layers = [nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 3)]
model = nn.Sequential(*layers).requires_grad_(False)
layers[-1].requires_grad_(True)
optimizer = torch.optim.Adam(layers[-1].parameters())
for epoch in range(3):
    if epoch:
        layers[-1 - epoch].requires_grad_(True)
        optimizer.add_param_group({"params": layers[-1 - epoch].parameters()})
    for step in range(12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(16, 10)), torch.randint(0, 3, (16,))).backward()
        optimizer.step()
