"""Several sequences per update, whose mean losses are added up on purpose."""

import torch
from torch import nn
torch.manual_seed(0)
cell, head = nn.RNNCell(4, 8), nn.Linear(8, 1)
opt = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=.001)
for ep in range(15):
    opt.zero_grad()
    for t in range(5):
        h = torch.zeros(3, 8)
        for _ in range(3): h = cell(torch.randn(3, 4), h)
        head(h).square().mean().backward()
    opt.step()
