"""A program prepares the data, and takes its time over it."""

import subprocess
import sys

import torch
from torch import nn

WORK = "import time\nend = time.time() + 4.5\nwhile time.time() < end: sum(range(1000))\nprint(4)"
size = int(subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, check=True).stdout)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(size, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
