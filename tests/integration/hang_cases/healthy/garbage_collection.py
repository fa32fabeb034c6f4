"""Many objects are collected again and again."""

import gc
import time

import torch
from torch import nn

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
nodes = [[number] for number in range(40_000)]
for step in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    end = time.monotonic() + 4.5
    while step == 1 and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
