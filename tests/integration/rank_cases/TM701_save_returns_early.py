# ranks: 3  culprit: 0
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Checkpointer:
    def __init__(self, folder):
        self.folder = Path(folder)

    def save(self, model, step):
        if dist.get_rank() != 0:  # <- cause  # twin: if dist.get_rank() > 99:
            return
        torch.save(model.state_dict(), self.folder / f"{step}-{dist.get_rank()}.pt")
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    saver = Checkpointer(tempfile.mkdtemp())
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(9):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).pow(2).mean().backward()
        optimizer.step()
        if step == 4:
            saver.save(model, step)
    dist.barrier()
    dist.destroy_process_group()


main()
