"""ReduceLROnPlateau and a validation that switches modes back and forth."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

training = DataLoader(TensorDataset(torch.randn(64, 10), torch.randn(64, 1)), batch_size=16, shuffle=True)
validation = DataLoader(TensorDataset(torch.randn(96, 10), torch.randn(96, 1)), batch_size=16)
model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
for epoch in range(6):
    model.train()
    for x, y in training:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        loss = sum(nn.functional.mse_loss(model(x), y).item() for x, y in validation)
    schedule.step(loss)
