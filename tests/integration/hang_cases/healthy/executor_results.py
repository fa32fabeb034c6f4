"""Results are collected from a pool of threads, which compute for seconds."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn


def score(number):
    end, best = time.monotonic() + 4.5, 0.0
    while time.monotonic() < end:
        best = max(best, torch.linalg.det(torch.randn(64, 64)).item())
    return best * 0 + number


model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ThreadPoolExecutor(2) as pool:
    for step in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1:
            scores = [future.result() for future in [pool.submit(score, number) for number in range(2)]]
