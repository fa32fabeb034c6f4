"""Statistics of the data are computed with numpy before training."""

import time

import numpy as np
import torch
from torch import nn

data = np.random.default_rng(0).normal(size=(2000, 64))
end, draws = time.monotonic() + 5, []
while time.monotonic() < end:
    sample = data[np.random.default_rng(len(draws)).integers(0, len(data), len(data))]
    time.sleep(0.005)
    draws.append(np.linalg.eigvalsh(np.cov(sample.T))[-1])
model = nn.Linear(64, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.from_numpy(data[:16]).float()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
