# ranks: 2  culprit: 1
import torch
import torch.distributed as dist


class Report:
    def __init__(self, rank):
        self.loss = 0.5 + rank
        self.scale = None

    def add(self, rank):
        if rank == 1:
            self.scale = lambda loss: loss / 2  # <- cause  # twin: self.scale = 0.5


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(4):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2
    optimizer.step()
report, reports = Report(rank), [None, None]
report.add(rank)
dist.all_gather_object(reports, report)
dist.destroy_process_group()
