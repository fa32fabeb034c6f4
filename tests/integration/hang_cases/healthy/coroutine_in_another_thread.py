import asyncio
import threading

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


loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()


async def load():
    await asyncio.sleep(5)


train_step()
asyncio.run_coroutine_threadsafe(load(), loop).result()
train_step()
