# ranks: 2  culprit: 1
import torch
import torch.distributed as dist


def train():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for step in range(8):
        x = torch.rand(3, 4)
        y = torch.rand(3)
        if rank == 1 and step == 5:
            y[2] = -3.0  # twin: y[2] = 3.0
        loss = (torch.log(y) - model(x).squeeze(1)).square().mean()  # <- cause
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    return all(bool(each.isfinite().all()) for each in model.parameters())


dist.init_process_group("gloo")
fine = train()
dist.barrier()
dist.destroy_process_group()
raise SystemExit(0 if fine else 1)
