import asyncio
import threading

import torch
from torch import nn

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def step():
    loss = model(torch.randn(4, 2)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


async def optional():
    raise ConnectionError("no dashboard here")


async def main():
    for _ in range(10):
        step()
    extra = asyncio.create_task(optional())
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    threading.Timer(6.0, lambda: loop.call_soon_threadsafe(ready.set)).start()
    await ready.wait()
    step()
    assert extra.exception() is not None


asyncio.run(main())
