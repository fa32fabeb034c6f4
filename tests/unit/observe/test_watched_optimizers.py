"""The optimizers that the watch over a loop knows."""

from __future__ import annotations

import gc

import torch

from torchmedic.observe.loop.events import Watched


def test_an_optimizer_is_there_from_the_end_of_its_constructor_until_it_is_freed() -> None:
    optimizer = torch.optim.SGD.__new__(torch.optim.SGD)
    watched = Watched(optimizer, 1, None)
    assert watched.optimizer is None  # another thread has begun to construct it
    torch.optim.SGD.__init__(optimizer, [torch.ones(1, requires_grad=True)], lr=0.1)
    assert watched.optimizer is optimizer
    del optimizer
    gc.collect()
    assert watched.optimizer is None
