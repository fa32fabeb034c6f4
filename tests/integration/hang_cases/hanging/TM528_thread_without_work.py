import queue
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


signal.alarm(60)
work = queue.Queue()


class Loader(threading.Thread):
    def run(self):
        while True:
            self.load(work.get())  # <- cause

    def load(self, item):
        pass


loader = Loader()
loader.start()
for step in range(2):
    work.put(train_step())
loader.join()
