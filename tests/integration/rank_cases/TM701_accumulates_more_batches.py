# ranks: 2  culprit: 1
import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Loop:
    def __init__(self, accumulate):
        torch.manual_seed(0)
        self.model = DistributedDataParallel(torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.accumulate = accumulate

    def run(self, turns):
        for turn in range(1, turns + 1):
            is_last = turn % self.accumulate == 0
            with contextlib.nullcontext() if is_last else self.model.no_sync():  # <- cause
                loss = self.model(torch.randn(4, 4)).square().mean() / self.accumulate
                loss.backward()
            if is_last:
                self.optimizer.step()
                self.optimizer.zero_grad()


dist.init_process_group("gloo")
memory = 4 if dist.get_rank() == 1 else 8  # twin: memory = 4
Loop(16 // memory).run(24)
dist.barrier()
dist.destroy_process_group()
