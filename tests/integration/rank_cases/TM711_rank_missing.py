# ranks: 2  culprit: any
import datetime
import os

import torch
import torch.distributed as dist


def main():
    world = 3  # twin: world = 2
    rank = int(os.environ["RANK"])
    limit = datetime.timedelta(seconds=2)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=limit)  # <- cause
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.destroy_process_group()


main()
