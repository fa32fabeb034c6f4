import queue
import threading
import time

import torch

batches = queue.Queue()


def first():
    batches.put(torch.randn(2, 4))


def second():
    time.sleep(6)
    batches.put(torch.randn(2, 4))


threading.Thread(target=first).start()
threading.Thread(target=second).start()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    optimizer.zero_grad()
    model(batches.get()).square().mean().backward()
    optimizer.step()
print("trained")
