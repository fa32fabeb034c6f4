"""A cosine over all batches, after a warm-up that begins at zero."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

loader = DataLoader(TensorDataset(torch.randn(96, 10), torch.randn(96, 1)), batch_size=8, shuffle=True)
model = nn.Linear(10, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 6))
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(loader))
schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[6])
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
