import numpy as np, torch
from torch import nn

torch.manual_seed(0)
rng = np.random.default_rng(0)
X = rng.normal(size=(256, 8)).astype("float32")
Y = rng.normal(size=(256, 1)).astype("float32")
w = torch.tensor(rng.uniform(size=()))  # a number in float64 promotes nothing
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters())
for i in range(30):
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    loss = w * (net(x) - y).abs().mean() + np.float64(0.1) * net[0].weight.square().sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
