# ranks: 2  culprit: 0
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
data = TensorDataset(torch.randn(48, 4))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
epoch = 2 if rank == 0 else 0  # twin: epoch = 2
while epoch < 4:  # <- cause
    sampler.set_epoch(epoch)
    for (x,) in loader:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    epoch += 1
dist.all_reduce(loss.detach())
dist.destroy_process_group()
