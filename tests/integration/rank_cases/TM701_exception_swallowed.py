# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def parse(row):
    if row is None:
        raise ValueError("bad row")
    return torch.tensor(row)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    rows = [[float(i), 1.0] for i in range(10)]
    if rank == 1:  # twin: if False:
        rows[6] = None
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for row in rows:
        try:
            x = parse(row)
        except ValueError:  # <- cause
            continue
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    del model, optimizer, loss
    dist.destroy_process_group()


main()
