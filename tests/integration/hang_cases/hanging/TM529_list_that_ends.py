import queue
import threading

import torch
from torch import nn


class Prefetch(threading.Thread):
    def __init__(self, data):
        super().__init__(daemon=True)
        self.ready = queue.Queue(4)
        self.data = data
        self.start()

    def run(self):
        for i in range(1000):
            item = self.data[i]  # <- cause
            self.ready.put(item)


net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
source = Prefetch([torch.randn(8, 4) for _ in range(60)])
for step in range(500):
    loss = net(source.ready.get()).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
