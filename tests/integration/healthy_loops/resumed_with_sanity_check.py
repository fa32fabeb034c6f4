"""Resumed from a checkpoint, validated first, then trained with warm restarts."""

import torch, io
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
va = DataLoader(TensorDataset(torch.randn(64, 10), torch.randn(64, 1)), batch_size=8)
model = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=.1)
s = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 5)
buf = io.BytesIO(); torch.save([model.state_dict(), opt.state_dict(), s.state_dict()], buf); buf.seek(0)
a, b, c = torch.load(buf); model.load_state_dict(a); opt.load_state_dict(b); s.load_state_dict(c)
model.eval()
with torch.no_grad():
    for x, y in va: model(x)
for ep in range(4):
    model.train()
    for i in range(10):
        model.zero_grad(set_to_none=False)
        model(torch.randn(8, 10)).square().mean().backward()
        opt.step()
        s.step(ep + i / 10)
