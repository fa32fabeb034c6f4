"""The main thread waits for a lock that a thread holds for some seconds, and gives back."""

import threading
import time

import torch
from torch import nn

lock = threading.Lock()
taken = threading.Event()


def publish():
    with lock:
        taken.set()
        time.sleep(5)


model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if step == 2:
        threading.Thread(target=publish).start()
        taken.wait()
    with lock:
        loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
