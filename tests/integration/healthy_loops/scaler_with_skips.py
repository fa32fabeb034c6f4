"""GradScaler begins with a scale that is far too high, skips steps, and clips after unscaling."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1000)
for step in range(40):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(torch.randn(16, 10)), torch.randn(16, 1))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
