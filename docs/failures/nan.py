"""A classifier that normalises every row by its standard deviation. One row of the data is constant."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class RowNorm(nn.Module):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / centred.std(-1, keepdim=True)


torch.manual_seed(0)
data, labels = torch.randn(4096, 32), torch.randint(0, 4, (4096,))
data[3011] = 0.5

model = nn.Sequential(RowNorm(), nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters())

for inputs, targets in DataLoader(TensorDataset(data, labels), batch_size=32):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
