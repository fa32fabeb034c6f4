import os
import subprocess
import tempfile
import time

import torch
from torch import nn

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train_step():
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


path = os.path.join(tempfile.mkdtemp(), "PAUSE")
train_step()
open(path, "w").close()
subprocess.Popen(["sh", "-c", f"sleep 4; rm {path}"])
while os.path.exists(path):
    time.sleep(0.5)
train_step()
