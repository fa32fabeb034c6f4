import threading
import time

import torch
from torch import nn

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = threading.Event()


def upload():
    saved.wait()
    for _ in range(40):
        time.sleep(0.2)


threading.Thread(target=upload, name="upload").start()
for _ in range(10):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
saved.set()
