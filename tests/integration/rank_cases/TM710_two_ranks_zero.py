# ranks: 2  culprit: 0
import datetime
import os

import torch
import torch.distributed as dist

rank = int(os.environ.get("NODE_RANK", 0))  # twin: rank = int(os.environ["RANK"])
limit = datetime.timedelta(seconds=20)
url = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2, timeout=limit)  # <- cause
total = torch.ones(3)
dist.all_reduce(total)
dist.destroy_process_group()
