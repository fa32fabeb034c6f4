"""The running average of the weights is evaluated on the CPU for a while."""

import copy
import time

import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters())
for step in range(6):
    loss = model(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for kept, now in zip(average.parameters(), model.parameters(), strict=True):
            kept.lerp_(now, 0.1)
    if step == 3:
        end, scores = time.monotonic() + 5, []
        with torch.inference_mode():
            while time.monotonic() < end:
                scores.append(average(torch.randn(512, 64)).argmax(1).bincount(minlength=8).tolist())
                time.sleep(0.005)
