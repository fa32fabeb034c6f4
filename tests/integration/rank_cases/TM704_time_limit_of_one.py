# ranks: 2  culprit: 0
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    def __init__(self, limit):
        self.model = DistributedDataParallel(torch.nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.limit = limit

    def fit(self):
        began = time.monotonic()
        for _ in range(40):
            loss = self.model(torch.randn(3, 4)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            time.sleep(0.02)
            if time.monotonic() - began > self.limit:  # <- cause
                return


def main():
    trainer = Trainer(0.2 if dist.get_rank() == 0 else 60)  # twin: trainer = Trainer(60)
    trainer.fit()


dist.init_process_group("gloo")
main()
dist.barrier()
dist.destroy_process_group()
