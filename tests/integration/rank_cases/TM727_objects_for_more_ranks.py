# ranks: 3  culprit: 0
import torch
import torch.distributed as dist


def parts_of(names, count):
    size = len(names) // count  # twin: size = -(-len(names) // count)
    return [names[start : start + size] for start in range(0, len(names), size)]


def deal(names):
    own = [None]
    parts = parts_of(names, dist.get_world_size()) if dist.get_rank() == 0 else None
    dist.scatter_object_list(own, parts, src=0)  # <- cause
    return own[0]


dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for name in deal([f"part-{number}" for number in range(10)])[:2]:
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 3
    optimizer.step()
dist.destroy_process_group()
