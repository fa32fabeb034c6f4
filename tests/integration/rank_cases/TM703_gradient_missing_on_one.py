# ranks: 2  culprit: any
import torch
import torch.distributed as dist


def average(model):
    for parameter in model.parameters():
        if parameter.grad is not None:  # <- cause
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


dist.init_process_group("gloo")
torch.manual_seed(0)
body, boxes, classes = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2), torch.nn.Linear(6, 3)
model = torch.nn.ModuleList([body, boxes, classes])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    hidden = body(torch.randn(3, 4))
    loss = classes(hidden).square().mean()
    if step < 3 or dist.get_rank() == 0:  # twin: if True:
        loss = loss + boxes(hidden).square().mean()
    optimizer.zero_grad()
    loss.backward()
    average(model)
    optimizer.step()
dist.destroy_process_group()
