# ranks: 2  culprit: 0
import torch
import torch.distributed as dist


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for step in range(8):
        x = torch.rand(3, 4)
        if rank == 0 and step == 2:
            x[1] = 0  # twin: x[1] = 1
        loss = model(x).square().sum(1).sqrt().mean()  # <- cause
        optimizer.zero_grad()
        loss.backward()
        average(model)
        optimizer.step()
    return all(bool(each.isfinite().all()) for each in model.parameters())


dist.init_process_group("gloo")
fine = train()
dist.barrier()
dist.destroy_process_group()
raise SystemExit(0 if fine else 1)
