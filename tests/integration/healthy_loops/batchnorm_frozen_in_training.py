"""All of the model is put into evaluation mode before training: fine-tuning with fixed statistics."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for epoch in range(3):
    model.train()
    model[1].eval()
    for step in range(8):
        optimizer.zero_grad()
        model(torch.randn(16, 10)).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.randn(16, 10))
