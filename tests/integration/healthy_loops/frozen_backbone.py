"""A frozen backbone in evaluation mode under a head that is trained."""

import torch
from torch import nn

torch.manual_seed(0)

backbone = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU()).requires_grad_(False).eval()
head = nn.Linear(16, 3)
model = nn.Sequential(backbone, head)
optimizer = torch.optim.Adam(filter(lambda parameter: parameter.requires_grad, model.parameters()))
for step in range(20):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.randn(16, 10)), torch.randint(0, 3, (16,))).backward()
    optimizer.step()
