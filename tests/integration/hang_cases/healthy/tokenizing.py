"""A corpus is tokenized in pure Python before each of the epochs, which may end early."""

import re
import time

import torch
from torch import nn

WORD = re.compile(r"\w+|[^\w\s]")


def tokenize(text):
    return [word.lower() for word in WORD.findall(text)]


def corpus(seconds):
    end = time.monotonic() + seconds
    counts = {}
    for line in iter(lambda: time.monotonic() < end, False):
        for word in tokenize("The quick brown fox, jumps over the lazy dog; " * 20):
            counts[word] = counts.get(word, 0) + int(line)
    return counts


model = nn.Embedding(32, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    vocabulary = sorted(corpus(4.5 if epoch else 0.2))
    for step in range(3):
        loss = model(torch.randint(0, len(vocabulary), (4,))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if epoch == 5:
        break
