# ranks: 2  culprit: any
import torch
import torch.distributed as dist

LAST = 3  # twin: LAST = 1


def groups():
    return [dist.new_group([first, LAST]) for first in range(1)]  # <- cause


dist.init_process_group("gloo")
found = groups()
value = torch.ones(2)
dist.all_reduce(value, group=found[0])
dist.destroy_process_group()
