"""A progress bar has a thread of its own, which only watches; preparing takes long."""

import hashlib

import torch
from torch import nn
from tqdm import tqdm

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
digest, block = hashlib.sha256(), bytes(1 << 20)
for _ in tqdm(range(3000)):
    digest.update(block)
for step in tqdm(range(3)):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
