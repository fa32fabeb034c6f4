# ranks: 2  culprit: any
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Found:
    def __init__(self, boxes, scores):
        self.boxes, self.scores = boxes, scores

    def __iter__(self):
        return iter((self.boxes, self.scores))


class Detector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 4)
        self.box = torch.nn.Linear(4, 4)
        self.score = torch.nn.Linear(4, 2)

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return Found(self.box(x), self.score(x))  # <- cause  # twin: return self.box(x), self.score(x)


dist.init_process_group("gloo")
model = DistributedDataParallel(Detector(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    boxes, scores = model(torch.randn(3, 4))
    loss = boxes.square().mean() + scores.logsumexp(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
