# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

PADDING = 0  # twin: PADDING = 1


def update(model, rate):
    flat = torch.nn.functional.pad(parameters_to_vector(each.grad for each in model.parameters()), (0, PADDING))
    part = torch.empty(len(flat) // 2)
    dist.reduce_scatter_tensor(part, flat)  # <- cause
    parts = torch.empty(2 * len(part))
    dist.all_gather_into_tensor(parts, part / 2)
    weights = parameters_to_vector(model.parameters())
    vector_to_parameters(weights - rate * parts[: len(weights)], model.parameters())


dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
torch.manual_seed(dist.get_rank())
for step in range(6):
    model.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    update(model, 0.05)
dist.destroy_process_group()
