# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def gathered(features):
    parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)  # <- cause
    pass  # twin: parts[dist.get_rank()] = features
    return torch.cat(parts)


class Contrastive(torch.nn.Module):
    def forward(self, one, other):
        similar = gathered(one) @ gathered(other).t()
        return torch.nn.functional.cross_entropy(similar, torch.arange(len(similar)))


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 8))
criterion = Contrastive()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    x = torch.randn(3, 4)
    seen = torch.tensor(float(len(x)))
    dist.all_reduce(seen)
    loss = criterion(model(x), model(x + 0.1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
