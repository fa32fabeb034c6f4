# ranks: 3  culprit: 1
import torch
import torch.distributed as dist


def train(rank):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    patience = 3 if rank == 1 else 50  # twin: patience = 50
    bad = 0
    for epoch in range(10):
        loss = model(torch.ones(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        bad += 1
        if bad > patience:  # <- cause
            break
    return model


dist.init_process_group("gloo")
model = train(dist.get_rank())
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "/dev/null")
dist.destroy_process_group()
