"""Truncated backpropagation through time, with a state that is carried over."""

import torch
from torch import nn

torch.manual_seed(0)

model, head = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 1)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
for epoch in range(2):
    state = torch.zeros(1, 4, 16)
    for chunk in torch.randn(4, 96, 8).split(8, dim=1):
        output, state = model(chunk, state.detach())
        loss = head(output).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
