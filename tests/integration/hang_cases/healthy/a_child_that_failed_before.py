"""A child that has failed is left behind, and the messages of its slow brother arrive."""

import multiprocessing
import sys
import time

import torch
from torch import nn


def slow(remote):
    while True:
        number = remote.recv()
        time.sleep(2.5 if number == 2 else 0.01)
        remote.send([number, 1.0])


def fails():
    sys.exit(3)


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe()
    for target, args in ((fails, ()), (slow, (far,))):
        context.Process(target=target, args=args, daemon=True).start()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        near.send(float(step))
        loss = model(torch.tensor(near.recv())).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
