# ranks: 2  culprit: 0
import datetime
import os
import socket

import torch
import torch.distributed as dist


def main():
    dashboard = socket.socket()
    if os.environ["RANK"] == "0":
        dashboard.bind(("0.0.0.0", int(os.environ["MASTER_PORT"])))  # twin: dashboard.bind(("0.0.0.0", 0))
        dashboard.listen()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))  # <- cause
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.destroy_process_group()


main()
