# A curriculum: sequences become longer with every step, within the step.
import torch
from torch import nn

torch.manual_seed(0)
cell, head = nn.GRUCell(3, 8), nn.Linear(8, 1)
opt = torch.optim.Adam([*cell.parameters(), *head.parameters()])
for step in range(30):
    h = torch.zeros(4, 8)
    for t in range(step + 1):
        h = cell(torch.randn(4, 3), h)
    loss = head(h).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
