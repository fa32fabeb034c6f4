"""Two optimizers that take turns; both are cleared every time."""

import torch
from torch import nn
torch.manual_seed(0)
a, b = nn.Linear(10, 8), nn.Linear(8, 1)
oa, ob = torch.optim.SGD(a.parameters(), lr=.01), torch.optim.SGD(b.parameters(), lr=.01)
for i in range(60):
    oa.zero_grad(); ob.zero_grad()
    loss = b(torch.relu(a(torch.randn(8, 10)))).square().mean()
    loss.backward()
    (oa if (i // 3) % 2 == 0 else ob).step()
