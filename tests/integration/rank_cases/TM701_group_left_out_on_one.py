# ranks: 3  culprit: 1
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 1])
group = pair if rank == 0 else None  # twin: group = pair
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()
    if rank < 2:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)  # <- cause
            parameter.grad /= 2
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
