"""The main thread waits for a message for a limited time, and goes on without it."""

import queue

import torch
from torch import nn

messages = queue.Queue()
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1:
        try:
            messages.get(timeout=5)
        except queue.Empty:
            pass
