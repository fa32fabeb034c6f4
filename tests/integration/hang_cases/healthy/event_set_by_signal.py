import os
import signal
import threading

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


go = threading.Event()
signal.signal(signal.SIGALRM, lambda *_: go.set())
signal.alarm(5)
train_step()
go.wait()
train_step()
