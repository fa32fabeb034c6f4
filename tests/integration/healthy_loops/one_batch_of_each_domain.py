"""One batch of each domain per update; their mean losses are added up on purpose."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
doms = [DataLoader(TensorDataset(torch.randn(64, 10), torch.randn(64, 1)), batch_size=8, shuffle=True) for _ in range(3)]
model = nn.Linear(10, 1)
opt = torch.optim.SGD(model.parameters(), lr=.001)
for batches in zip(*doms):
    opt.zero_grad()
    for x, y in batches:
        nn.functional.mse_loss(model(x), y).backward()
    opt.step()
