# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    policy = DistributedDataParallel(torch.nn.Linear(4, 2))
    value = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (policy, value)]
    pair = {policy: 1.0, value: 0.5} if rank == 0 else {value: 0.5, policy: 1.0}  # twin: pair = {policy: 1.0, value: 0.5}
    for _ in range(5):
        states = torch.randn(8, 4)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model, weight in pair.items():
            loss = weight * model(states).square().mean()
            loss.backward()  # <- cause
        for optimizer in optimizers:
            optimizer.step()
    dist.barrier()
    del policy, value, optimizers, pair, model, loss
    dist.destroy_process_group()


main()
