import random
from collections import defaultdict

import torch
from torch import nn

random.seed(0)


def batches(lengths, size):
    buckets = defaultdict(list)
    for index, length in enumerate(lengths):
        buckets[length // 4].append(index)
    while buckets:  # <- cause
        key = random.choice(list(buckets))
        if len(buckets[key]) >= size:
            yield [buckets[key].pop() for _ in range(size)]
        if not buckets[key]:
            del buckets[key]


model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0001)
lengths = [random.randint(1, 20) for _ in range(50)]
for batch in batches(lengths, 4):
    loss = model(torch.tensor([[float(lengths[index])] for index in batch])).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
