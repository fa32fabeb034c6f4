# ranks: 4  culprit: 2
import torch
import torch.distributed as dist


def batches(rank):
    for number in range(9 if rank != 2 else 7):  # twin: for number in range(9):
        yield torch.full((2, 4), float(number))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for batch in batches(rank):  # <- cause
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
if rank == 0:
    print("done")
dist.barrier()
dist.destroy_process_group()
