"""A training loop that keeps every loss with its graph, in a process that may have 3 GiB of address space."""

import resource

import torch
from torch import nn

resource.setrlimit(resource.RLIMIT_AS, (3 << 30, resource.RLIM_INFINITY))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())

history = []
for step in range(1000):
    inputs = torch.randn(16_384, 16)
    loss = model(inputs).pow(2).mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    history.append(loss)
