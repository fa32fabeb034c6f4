# ranks: 3  culprit: 1
import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        torch.manual_seed(step * 3 + dist.get_rank())
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # <- cause
        if step == 6 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # twin: print("on we go")
    del model, optimizer
    dist.destroy_process_group()


main()
