# ranks: 2  culprit: any
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch.nn.parallel import DistributedDataParallel


def contrast(z, labels):
    """Pulls items of one class together, over all ranks."""
    z = torch.nn.functional.normalize(z, dim=1)
    positives = (labels[:, None] == labels[None]).fill_diagonal_(False)
    if not positives.any():  # <- cause  # twin: if len(labels) == 0:
        return z.sum() * 0
    everyone = torch.cat(dnn.all_gather(z))
    logits = z @ everyone.T
    return -torch.log_softmax(logits, 1).mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(8):
        labels = torch.arange(6) if rank == 1 and step == 5 else torch.arange(6) // 2
        loss = contrast(model(torch.randn(6, 6)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    del model, optimizer, loss
    dist.destroy_process_group()


main()
