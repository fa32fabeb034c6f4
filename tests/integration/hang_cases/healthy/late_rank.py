"""Rank 1 prepares its data and joins the job seconds after rank 0."""

import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def prepare(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sorted(range(1000))


def fit():
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train(rank, folder):
    prepare(4.5 * rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    fit()  # the model is gone before the group: the other way round gloo may deadlock with the GIL
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(train, (os.getcwd(),), nprocs=2, start_method="fork")
