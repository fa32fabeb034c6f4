import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))
opt = torch.optim.Adam(net.parameters())
for ep in range(4):
    net.train()
    for _ in range(10):
        x = torch.randn(32, 10)
        opt.zero_grad()
        F.mse_loss(net(x), x[:, :1]).backward()
        opt.step()
    net.eval()
    for mod in net.modules():
        if isinstance(mod, nn.Dropout):
            mod.train()
    with torch.no_grad():
        s = torch.stack([net(torch.randn(16, 10)) for _ in range(8)]).std(0)
