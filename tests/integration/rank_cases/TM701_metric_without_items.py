# ranks: 3  culprit: 1
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Accuracy:
    def __init__(self):
        self.right = self.total = 0

    def update(self, logits, labels):
        self.right += int((logits.argmax(-1) == labels).sum())
        self.total += len(labels)

    def compute(self):
        if self.total == 0:  # <- cause
            return 0.0
        pair = torch.tensor([float(self.right), float(self.total)])
        dist.all_reduce(pair)
        return (pair[0] / pair[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        for _ in range(3):
            loss = model(torch.randn(4, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metric = Accuracy()
        batches = 0 if rank == 1 and epoch == 1 else 2  # twin: batches = 2
        for _ in range(batches):
            metric.update(model.module(torch.randn(4, 4)).detach(), torch.randint(0, 3, (4,)))
        metric.compute()
    dist.barrier()
    del model, optimizer, loss
    dist.destroy_process_group()


main()
