"""One native call after the other takes long, in a loop whose way out nobody has come near yet."""

import time

import torch
from torch import nn

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
patience, worse = 3, 0


def spectrum():
    end = time.monotonic() + 4.5
    return [torch.linalg.svdvals(torch.randn(300, 300)).max() for _ in iter(lambda: time.monotonic() < end, False)]


while True:
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not worse:
        spectrum()
    worse += 1
    if worse >= patience:
        break
