# ranks: 2  culprit: 0
import contextlib
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Timer:
    def __enter__(self):
        self.start = time.time()
        return self

    def __exit__(self, *error):
        dist.barrier()  # <- cause
        self.seconds = time.time() - self.start


def timed(rank):
    return Timer() if rank == 0 else contextlib.nullcontext()  # twin: return Timer()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        with timed(rank):
            for _ in range(3):
                loss = model(torch.randn(8, 4)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    total = loss.detach().reshape(1)
    dist.all_reduce(total)
    del model, optimizer, loss
    dist.destroy_process_group()


main()
