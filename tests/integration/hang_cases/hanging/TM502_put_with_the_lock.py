import queue
import threading

import torch
from torch import nn


class Prefetch:
    def __init__(self):
        self.items = queue.Queue(maxsize=2)
        self.lock = threading.Lock()
        threading.Thread(target=self.fill, daemon=True).start()

    def fill(self):
        while True:
            batch = torch.randn(8, 4)
            with self.lock:
                self.items.put(batch)  # <- cause

    def next(self):
        with self.lock:
            return self.items.get()


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train_step(batch):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


train_step(torch.randn(8, 4))
prefetch = Prefetch()
while not prefetch.items.full():
    pass
while True:
    train_step(prefetch.next())
