# ranks: 2  culprit: 1
import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


@contextlib.contextmanager
def tolerant(log):
    try:
        yield
    except IndexError as error:
        log.append(error.args)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(20, 4), torch.nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    errors = []
    for step in range(12):
        items = torch.randint(0, 20, (8,))
        if step == 5 and dist.get_rank() == 1:  # twin: if False:
            items[3] = 22
        with tolerant(errors):
            loss = model(items).square().mean()  # <- cause
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.barrier()
    del model, optimizer, loss
    dist.destroy_process_group()


main()
