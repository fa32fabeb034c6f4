"""Only the head is given to the optimizer; the rest is not even frozen."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.1)
for step in range(20):
    model.zero_grad()
    nn.functional.cross_entropy(model(torch.randn(16, 10)), torch.randint(0, 3, (16,))).backward()
    optimizer.step()
