"""What is trained is an image; the network that judges it is not frozen and not trained."""

import torch
from torch import nn

torch.manual_seed(0)

network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
goal = network(torch.randn(1, 3, 12, 12)).detach()
image = nn.Parameter(torch.randn(1, 3, 12, 12))
optimizer = torch.optim.Adam([image], lr=0.05)
for step in range(20):
    optimizer.zero_grad()
    nn.functional.mse_loss(network(image), goal).backward()
    optimizer.step()
