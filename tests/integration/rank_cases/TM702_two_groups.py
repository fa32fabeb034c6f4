# ranks: 4  culprit: any
import torch
import torch.distributed as dist

rows, columns = ([0, 1], [2, 3]), ([0, 2], [1, 3])


def groups(parts):
    made = [dist.new_group(part) for part in parts]
    return next(group for group, part in zip(made, parts, strict=True) if dist.get_rank() in part)


def norm(model, group):
    total = sum(parameter.grad.square().sum() for parameter in model.parameters())
    dist.all_reduce(total, group=group)


def average(model, group):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)


dist.init_process_group("gloo")
rank = dist.get_rank()
row, column = groups(rows), groups(columns)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
early = rank in (0, 3)  # twin: early = True
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    if early:
        norm(model, row)  # <- cause
        average(model, column)
    else:
        average(model, column)
        norm(model, row)
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
