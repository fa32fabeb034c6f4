"""A C function that releases the GIL waits for seconds, as a client of a server does."""

import ctypes

import torch
from torch import nn

libc = ctypes.CDLL(None)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1:
        libc.usleep(4_500_000)
