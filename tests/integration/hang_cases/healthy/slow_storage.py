"""Items come from storage that gives a few kilobytes at a time, read in the main process."""

import os
import threading
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

os.mkfifo("storage")


def serve():
    with open("storage", "wb", buffering=0) as pipe:
        for _ in range(44):
            pipe.write(os.urandom(16384))
            time.sleep(0.12)


class Remote(Dataset):
    def __init__(self):
        self.source = None

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.source = self.source or open("storage", "rb", buffering=0)  # noqa: SIM115
        data = b""
        while len(data) < 180000:
            data += self.source.read(180000 - len(data))
        return torch.frombuffer(bytearray(data[:32]), dtype=torch.uint8).float()


threading.Thread(target=serve, daemon=True).start()
model = nn.Linear(32, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for x in DataLoader(Remote(), batch_size=4):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
