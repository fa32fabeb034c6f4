# ranks: 3  culprit: 2
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Timer:
    def __enter__(self):
        self.begun = time.perf_counter()

    def __exit__(self, *error):
        seconds = torch.tensor([time.perf_counter() - self.begun])
        dist.all_reduce(seconds)


def cropped(x, top):
    crop = x[:, top : top + 8]
    if crop.shape[1] != 8:
        raise IndexError(f"a crop of {crop.shape[1]} columns")  # <- cause
    return crop


def train():
    width = 9 if dist.get_rank() == 2 else 12  # twin: width = 12
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Timer():
        for step in range(12):
            x = cropped(torch.randn(4, width), step % 4)
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


dist.init_process_group("gloo")
train()
dist.destroy_process_group()
