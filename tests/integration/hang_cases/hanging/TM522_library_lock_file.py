import os
import signal
import tempfile

import filelock

import torch
from torch import nn

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train_step():
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


signal.alarm(60)
path = os.path.join(tempfile.mkdtemp(), "data.lock")
open(path, "w").close()
os.utime(path, (1, 1))
train_step()
with filelock.SoftFileLock(path):  # <- cause
    train_step()
