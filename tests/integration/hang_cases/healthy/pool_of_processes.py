import concurrent.futures
import multiprocessing
import time

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


def load(n):
    time.sleep(4.5)
    return n


train_step()
with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
    for n in pool.map(load, range(1)):
        train_step()
