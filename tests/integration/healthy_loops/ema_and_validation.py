"""An averaged model is validated, the other one is trained."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

training = DataLoader(TensorDataset(torch.randn(96, 10), torch.randn(96, 1)), batch_size=16, shuffle=True)
validation = DataLoader(TensorDataset(torch.randn(96, 10), torch.randn(96, 1)), batch_size=16)
model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(4):
    model.train()
    for x, y in training:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    average.update_parameters(model)
    torch.optim.swa_utils.update_bn(validation, average)
    model.eval()
    with torch.no_grad():
        for x, y in validation:
            model(x), average(x)
