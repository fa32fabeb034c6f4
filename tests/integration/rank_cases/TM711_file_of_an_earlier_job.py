# ranks: 2  culprit: any
import os
import shutil
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANK, LIMIT = int(os.environ["RANK"]), timedelta(seconds=10)


def join(name):
    way = f"file://{Path(name).absolute()}"
    dist.init_process_group("gloo", init_method=way, rank=RANK, world_size=2, timeout=LIMIT)  # <- cause


join("first")
if RANK == 0:
    shutil.copy("first", "kept")
dist.barrier()
dist.destroy_process_group()
join("kept")  # twin: join("second")
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
