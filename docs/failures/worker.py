"""A dataset of texts, read by two worker processes. One text is empty."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        counts = torch.zeros(26)
        for letter in self.texts[index]:
            counts[ord(letter) - 97] += 1
        first = ord(self.texts[index][0]) - 97
        return counts, first


texts = ["abc", "hello", "world", "torch"] * 100
texts[250] = ""
model = nn.Linear(26, 26)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for counts, first in DataLoader(Texts(texts), batch_size=8, num_workers=2):
    loss = nn.functional.cross_entropy(model(counts), first)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
