"""A state is loaded as `state_dict=...`, as the checkpoints of torch.distributed do."""

import torch
from torch import nn

torch.manual_seed(0)

model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))
start = {name: value.clone() for name, value in model.state_dict().items()}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    if step in (0, 1):
        model.load_state_dict(state_dict=start, strict=True)
    x = torch.randn(8, 10)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
