"""Two losses with a backward each, one update."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU())
left, right = nn.Linear(16, 1), nn.Linear(16, 3)
parameters = [*model.parameters(), *left.parameters(), *right.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
for step in range(20):
    x = torch.randn(16, 10)
    hidden = model(x)
    optimizer.zero_grad()
    left(hidden).square().mean().backward(retain_graph=True)
    nn.functional.cross_entropy(right(hidden), torch.randint(0, 3, (16,))).backward()
    optimizer.step()
