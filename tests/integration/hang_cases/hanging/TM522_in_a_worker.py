import fcntl
import tempfile
import os
import signal

from torch.utils.data import DataLoader, Dataset

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


signal.alarm(60)
path = tempfile.mktemp(suffix=".lock")
mine = open(path, "w")
fcntl.flock(mine, fcntl.LOCK_EX)


class Images(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3:
            fcntl.flock(open(path), fcntl.LOCK_EX)  # <- cause
        return torch.randn(8)


def main():
    for batch in DataLoader(Images(), batch_size=2, num_workers=2):
        train_step()


main()
