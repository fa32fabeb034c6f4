# ranks: 2  culprit: 1
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def prepared(x):
    if x.abs().max() > 50:
        raise ValueError("an outlier")
    return x / 3


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [torch.randn(4, 5) for _ in range(8)]
    if rank == 1:  # twin: if False:
        batches[5][0, 0] = 80.0
    for x in batches:
        try:
            loss = model(prepared(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        except ValueError as error:  # <- cause
            print("skipped:", error)
    dist.barrier()
    del model, optimizer, loss
    dist.destroy_process_group()


main()
