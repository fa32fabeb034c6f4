"""Steps with a strange loss are left out, and their gradients are cleared."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(16, 10)).square().mean()
    loss.backward()
    if loss.item() > 0.4 and step % 3:
        optimizer.zero_grad()
        continue
    optimizer.step()
    optimizer.zero_grad()
