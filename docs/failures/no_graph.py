"""A training step whose forward pass runs without gradients, to save memory."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters())

for step in range(100):
    inputs, targets = torch.randn(32, 16), torch.randint(0, 4, (32,))
    with torch.no_grad():
        outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
