import copy, torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.k = copy.deepcopy(self.q)
        for p in self.k.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(8, 64), dim=0))
        self.ptr = 0

    @torch.no_grad()
    def ema(self):
        for a, b in zip(self.q.parameters(), self.k.parameters()):
            b.data = b.data * 0.99 + a.data * 0.01

    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            self.ema()
            k = F.normalize(self.k(b), dim=1)
        l = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.07
        with torch.no_grad():
            self.queue[:, self.ptr : self.ptr + 8] = k.T
            self.ptr = (self.ptr + 8) % 64
        return l, torch.zeros(len(l), dtype=torch.long)


m = MoCo()
opt = torch.optim.SGD(m.parameters(), 0.03, momentum=0.9)
for i in range(60):
    x = torch.randn(8, 16)
    o, t = m(x, x + 0.1)
    loss = F.cross_entropy(o, t)
    opt.zero_grad()
    loss.backward()
    opt.step()
