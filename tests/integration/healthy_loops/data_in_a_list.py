"""The dataset is a plain list, which no weak reference can be made to."""

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
data = [(torch.randn(10), index // 16) for index in range(64)]
model = nn.Linear(10, 4)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
