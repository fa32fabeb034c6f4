import multiprocessing
import signal

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
context = multiprocessing.get_context("fork")
tasks, results = context.Queue(2), context.Queue(2)


def work():
    signal.alarm(60)  # it is not inherited
    while True:
        results.put(tasks.get())


child = context.Process(target=work, daemon=True)
child.start()
train_step()
for number in range(20):
    tasks.put(number)  # <- cause
for number in range(20):
    results.get()
