"""A worker raises an exception, and `recv()` does not end: its brother has inherited its end of the pipe."""

import multiprocessing

import torch
from torch import nn


def environment(remote, last):
    total = 0.0
    while True:
        total += remote.recv()
        if last is not None and total > last:
            raise ValueError(total)  # <- cause
        remote.send([total, 1.0])


def train(model, remotes):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(40):
        for remote in remotes:
            remote.send(1.0)
        states = torch.tensor([remote.recv() for remote in remotes])
        loss = model(states / 40).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    for number, (_, remote) in enumerate(pipes):
        context.Process(target=environment, args=(remote, 6.0 if number == 0 else None), daemon=True).start()
    train(nn.Linear(2, 1), [remote for remote, _ in pipes])
