import time

import torch
import torch.multiprocessing as mp
from torch import nn


def evaluate(number, results):
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    results.put([number] * 100_000)


def main():
    results = mp.get_context("spawn").Queue()
    processes = mp.spawn(evaluate, (results,), nprocs=2, join=False)
    for _ in range(2):
        time.sleep(5)
        results.get()
    processes.join()


if __name__ == "__main__":
    main()
