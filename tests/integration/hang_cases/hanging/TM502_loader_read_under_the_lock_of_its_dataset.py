import multiprocessing

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Counted(Dataset):
    def __init__(self):
        self.lock = multiprocessing.Lock()
        self.reads = torch.zeros(32).share_memory_()

    def __len__(self):
        return 32

    def __getitem__(self, index):
        with self.lock:
            self.reads[index] += 1
        return torch.ones(4) * index


def main():
    data = Counted()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0001)
    for batch in DataLoader(data, 8):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with data.lock:  # <- cause
        print(data.reads.sum().item())
        print(sum(model(batch).mean().item() for batch in DataLoader(data, 8, num_workers=1)))


main()
