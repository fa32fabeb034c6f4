import asyncio

import torch
from torch import nn

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


async def fetch(records, queue):
    for record in records:
        await asyncio.sleep(0.001)
        await queue.put(torch.tensor([record["a"], record["b"]]))  # <- cause


async def train():
    queue = asyncio.Queue(4)
    records = [{"a": 1.0, "b": 2.0}] * 20 + [{"a": 1.0}]
    producer = asyncio.create_task(fetch(records, queue))
    while True:
        x = await queue.get()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if producer.cancelled():
            break


asyncio.run(train())
