import torch
from torch import nn

torch.manual_seed(0)
body, rec, cls = nn.Sequential(nn.Linear(10, 16), nn.ReLU()), nn.Linear(16, 10), nn.Linear(16, 3)
opt = torch.optim.Adam([*body.parameters(), *rec.parameters()])
for i in range(40):
    x = torch.randn(8, 10)
    opt.zero_grad()
    nn.functional.mse_loss(rec(body(x)), x).backward()
    opt.step()
body.requires_grad_(False)
opt = torch.optim.Adam(cls.parameters())
for i in range(40):
    opt.zero_grad()
    nn.functional.cross_entropy(cls(body(torch.randn(8, 10))), torch.randint(0, 3, (8,))).backward()
    opt.step()
body.requires_grad_(True)
opt.add_param_group({"params": body.parameters(), "lr": 1e-4})
for i in range(40):
    opt.zero_grad()
    nn.functional.cross_entropy(cls(body(torch.randn(8, 10))), torch.randint(0, 3, (8,))).backward()
    opt.step()
