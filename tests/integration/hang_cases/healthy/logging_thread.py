"""Steps are slow, and a thread logs from a queue beside them."""

import logging
import logging.handlers
import queue
import time

import torch
from torch import nn

records = queue.Queue()
listener = logging.handlers.QueueListener(records, logging.NullHandler())
logging.getLogger().addHandler(logging.handlers.QueueHandler(records))
listener.start()
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    end = time.monotonic() + (2.4 if step else 0)
    while time.monotonic() < end:
        logging.getLogger("data").info("reading %d", step)
        time.sleep(0.05)
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
listener.stop()
