"""A regression whose learning rate is too high: the updates make the loss larger."""

import torch
from torch import nn

torch.manual_seed(0)
inputs = torch.randn(512, 16)
targets = inputs @ torch.randn(16, 1)
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.5)

for epoch in range(200):
    for start in range(0, 512, 128):
        loss = nn.functional.mse_loss(model(inputs[start : start + 128]), targets[start : start + 128])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
