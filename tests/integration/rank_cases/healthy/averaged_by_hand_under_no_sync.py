# ranks: 2
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def average(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def train(every, *, gradients):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(31):
        inputs = torch.randn(8, 4)
        with model.no_sync():
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
        if gradients:
            average([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        if not gradients and number % every == 0:
            average([parameter.data for parameter in model.parameters()])


dist.init_process_group("gloo")
train(8, gradients=False)
train(1, gradients=True)
dist.barrier()
dist.destroy_process_group()
