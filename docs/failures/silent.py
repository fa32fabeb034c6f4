"""A model in two parts. The optimizer was given the parameters of one of them."""

import torch
from torch import nn

torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64))
head = nn.Linear(64, 4)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)

for step in range(200):
    inputs, targets = torch.randn(64, 32), torch.randint(0, 4, (64,))
    loss = nn.functional.cross_entropy(head(backbone(inputs)), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
