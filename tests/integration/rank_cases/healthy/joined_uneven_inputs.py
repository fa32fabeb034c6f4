# ranks: 2
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def main():
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        with Join([model]):
            for _ in range(6 - 2 * dist.get_rank()):
                loss = model(torch.randn(3, 4)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


dist.init_process_group("gloo")
main()
dist.barrier()
dist.destroy_process_group()
