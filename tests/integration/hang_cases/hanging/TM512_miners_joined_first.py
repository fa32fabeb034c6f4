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
results = context.Queue()


class Miner(context.Process):
    def run(self):
        signal.alarm(60)  # it is not inherited
        for _ in range(100):
            results.put(list(range(10_000)))


class Trainer:
    def mine(self):
        miners = [Miner(), Miner()]
        for miner in miners:
            miner.start()
        for miner in miners:
            miner.join()  # <- cause
        return [results.get() for _ in range(200)]


train_step()
Trainer().mine()
