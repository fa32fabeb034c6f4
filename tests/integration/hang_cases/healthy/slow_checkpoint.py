"""A checkpoint goes to slow storage, a piece at a time."""

import time

import torch
from torch import nn


class SlowDisk:
    def __init__(self, path):
        self.file = open(path, "wb")  # noqa: SIM115

    def write(self, data):
        for start in range(0, len(data), 1 << 18):
            piece = data[start : start + (1 << 18)]
            self.file.write(piece)
            self.file.flush()
            time.sleep(len(piece) / 1e6)
        return len(data)

    def flush(self):
        self.file.flush()


model = nn.Linear(1000, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    loss = model(torch.randn(4, 1000)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 2:
        torch.save({"model": model.state_dict(), "step": step}, SlowDisk("model.pt"))
