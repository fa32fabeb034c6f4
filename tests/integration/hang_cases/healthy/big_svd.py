"""One native call of several seconds: the main thread stands at one instruction and burns a core."""

import torch
from torch import nn

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
basis = None
for step in range(4):
    if step == 2:
        basis = torch.linalg.svd(torch.randn(1900, 1900))[0]
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
