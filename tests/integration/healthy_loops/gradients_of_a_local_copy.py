"""The gradients of a local model are handed to the shared one, as asynchronous methods do."""

import torch
from torch import nn
torch.manual_seed(0)
shared, local = nn.Linear(4, 2), nn.Linear(4, 2)
opt = torch.optim.Adam(shared.parameters(), lr=1e-3)
for i in range(30):
    local.load_state_dict(shared.state_dict())
    local.zero_grad()
    local(torch.randn(8, 4)).square().mean().backward()
    for s, l in zip(shared.parameters(), local.parameters()):
        s.grad = l.grad
    opt.step()
