# ranks: 2  culprit: any
import datetime
import os

import torch
import torch.distributed as dist


def main():
    if os.environ["RANK"] == "1":
        os.environ["MASTER_PORT"] = "1"  # twin: os.environ["NAME"] = "1"
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))  # <- cause
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.destroy_process_group()


main()
