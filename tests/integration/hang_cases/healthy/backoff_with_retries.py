"""A server that is not up yet is asked again, with longer and longer pauses."""

import time

import torch
from torch import nn

ready = time.monotonic() + 5


def fetch():
    if time.monotonic() < ready:
        raise ConnectionError("not yet")
    return torch.randn(4, 8)


def with_retries(call, pause=0.3):
    for attempt in range(12):
        try:
            return call()
        except ConnectionError:
            time.sleep(min(pause * 2**attempt, 2.0))
    raise TimeoutError


model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = with_retries(fetch)
for step in range(3):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
