"""A training loop that never clears its gradients. It raises nothing, and it learns badly."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(200):
    inputs, targets = torch.randn(64, 32), torch.randint(0, 4, (64,))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
