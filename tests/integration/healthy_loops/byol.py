"""BYOL: a target network in training mode that only follows the other one."""

import torch
from torch import nn

torch.manual_seed(0)

import copy

online = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
target = copy.deepcopy(online).requires_grad_(False)
head = nn.Linear(8, 8)
optimizer = torch.optim.Adam([*online.parameters(), *head.parameters()], lr=1e-3)
for step in range(30):
    x = torch.randn(16, 10)
    with torch.no_grad():
        goal = target(x + 0.1 * torch.randn_like(x))
    loss = -nn.functional.cosine_similarity(head(online(x)), goal).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), online.parameters()):
            slow.lerp_(fast, 0.01)
