# ranks: 3  culprit: any
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(4):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 3
    optimizer.step()
losses = [torch.zeros(()) for _ in range(2)]  # twin: losses = [torch.zeros(()) for _ in range(3)]
dist.all_gather(losses, loss.detach())  # <- cause
dist.destroy_process_group()
