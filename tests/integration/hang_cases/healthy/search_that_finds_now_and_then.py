import random
import time

import torch
from torch import nn

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
found = time.monotonic()


def train():
    for _ in range(10):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def is_good(sample):
    global found
    if time.monotonic() < found + 2.2:
        return False
    found = time.monotonic()
    return True


train()
kept = []
while len(kept) < 4:
    sample = random.random()
    if is_good(sample):
        kept.append(sample)
train()
