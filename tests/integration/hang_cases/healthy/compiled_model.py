"""A small model is compiled at its first call, for the second time with another shape."""

import torch
from torch import nn

torch._inductor.config.fx_graph_cache = False
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2))
fast = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = fast(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
