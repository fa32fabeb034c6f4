"""Batches come through a queue from a thread that takes seconds for each."""

import queue
import threading
import time

import torch
from torch import nn

batches = queue.Queue(maxsize=2)


def produce():
    for _ in range(2):
        end = time.monotonic() + 2.8
        while time.monotonic() < end:
            batch = sorted(torch.randn(4, 8).tolist())
        batches.put(torch.tensor(batch))
    batches.put(None)


threading.Thread(target=produce, daemon=True).start()
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while (x := batches.get()) is not None:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
