"""Validation after the first epoch goes over many small batches."""

import time

import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters())


def validate(seconds):
    model.eval()
    total, end = 0.0, time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < end:
            total += model(torch.randn(256, 32)).square().mean().item()
            time.sleep(0.002)
    model.train()
    return total


for epoch in range(2):
    for step in range(5):
        loss = model(torch.randn(16, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch == 0:
        validate(4.5)
