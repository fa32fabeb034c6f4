# ranks: 2
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(4):
    try:
        if rank == 1 and step == 2:
            raise ValueError("a bad sample")
        value = torch.ones(1)
    except ValueError:
        value = torch.zeros(1)
    dist.all_reduce(value)
dist.barrier()
dist.destroy_process_group()
