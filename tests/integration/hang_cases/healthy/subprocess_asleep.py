"""A shell script waits a little for other things."""

import subprocess

import torch
from torch import nn

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1:
        subprocess.check_call(["sh", "-c", "sleep 4.5; true"])
