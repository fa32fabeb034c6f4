"""A new optimizer in every epoch, validation in evaluation mode with gradients on."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
tr = DataLoader(TensorDataset(torch.randn(64, 10), torch.randint(0, 3, (64,))), batch_size=8, shuffle=True)
va = DataLoader(TensorDataset(torch.randn(64, 10), torch.arange(64) // 22), batch_size=8)
model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Dropout(.2), nn.Linear(16, 3))
for epoch in range(5):
    opt = torch.optim.SGD(model.parameters(), lr=0.1 / (epoch + 1))
    model.train()
    for x, y in tr:
        opt.zero_grad(); nn.functional.cross_entropy(model(x), y).backward(); opt.step()
    model.eval()
    for x, y in va:
        model(x).argmax(1)
