"""A training loop and a thread that logs. Each takes two locks, in opposite orders."""

import threading
import time

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(64, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
weights_lock, metrics_lock = threading.Lock(), threading.Lock()
metrics = {}


def log_forever():
    while True:
        with metrics_lock:
            time.sleep(0.002)
            with weights_lock:
                metrics["norm"] = sum(float(p.detach().norm()) for p in model.parameters())


threading.Thread(target=log_forever, name="logger", daemon=True).start()

for step in range(100_000):
    loss = model(torch.randn(256, 64)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    with weights_lock:
        optimizer.step()
        if step % 20 == 19:
            with metrics_lock:
                metrics["loss"] = float(loss)
