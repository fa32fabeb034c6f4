# ranks: 3  culprit: 1
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Every(Sampler):
    """Each rank takes every third item."""

    def __iter__(self):
        return iter(range(dist.get_rank(), 28, dist.get_world_size()))  # twin: return iter(range(dist.get_rank(), 27, 3))

    def __len__(self):
        return 9


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(28, 4)), batch_size=3, sampler=Every())
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        for (batch,) in loader:  # <- cause
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
    dist.barrier()
    del model, loss, total
    dist.destroy_process_group()


main()
