# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    rank = dist.get_rank()
    data = TensorDataset(torch.randn(40, 4))
    share = Subset(data, range(0, 12) if rank == 0 else range(12, 40))  # twin: share = Subset(data, range(20 * rank, 20 * rank + 20))
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(share, batch_size=4, shuffle=True)
    for (batch,) in loader:  # <- cause
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
