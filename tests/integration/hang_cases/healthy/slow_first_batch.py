"""Each worker needs seconds for its first item, as it opens an archive."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Archive(Dataset):
    def __init__(self):
        self.opened = False

    def __len__(self):
        return 16

    def open(self):
        time.sleep(4.5)
        self.opened = True

    def __getitem__(self, index):
        if not self.opened:
            self.open()
        return torch.rand(8), index % 2


model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(Archive(), batch_size=4, num_workers=2):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
