"""One part is updated by an optimizer, another one by hand."""

import torch
from torch import nn

torch.manual_seed(0)

body, head = nn.Linear(10, 16), nn.Linear(16, 1)
optimizer = torch.optim.Adam(body.parameters())
for step in range(20):
    loss = head(torch.relu(body(torch.randn(16, 10)))).square().mean()
    optimizer.zero_grad()
    head.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter -= 0.01 * parameter.grad
