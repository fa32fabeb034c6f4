"""One batch is taken once, and trained on again and again, to see whether the model can learn it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

loader = DataLoader(TensorDataset(torch.randn(96, 10), torch.randn(96, 1)), batch_size=16)
x, y = next(iter(loader))
model = nn.Linear(10, 1)
optimizer = torch.optim.Adam(model.parameters())
for step in range(30):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
