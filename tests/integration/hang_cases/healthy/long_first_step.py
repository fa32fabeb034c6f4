"""The first step takes long, as it builds what the others use."""

import time

import torch
from torch import nn

table = {}


def features(x):
    if not table:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            table[len(table) % 1000] = torch.randn(8).softmax(0)
            time.sleep(0.0005)
    return x + table[0]


model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    loss = model(features(torch.randn(4, 8))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
