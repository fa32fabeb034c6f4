"""Activation checkpointing, reentrant and not."""

import torch
from torch import nn

torch.manual_seed(0)

from torch.utils.checkpoint import checkpoint

blocks = nn.ModuleList([nn.Sequential(nn.Linear(10, 10), nn.ReLU()) for _ in range(4)])
optimizer = torch.optim.Adam(blocks.parameters())
for step in range(16):
    x = torch.randn(16, 10, requires_grad=True)
    for number, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=number % 2 == 0)
    optimizer.zero_grad()
    x.square().mean().backward()
    optimizer.step()
