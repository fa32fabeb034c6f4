"""Gradients that were cleared before an update used them."""

from __future__ import annotations

import torch
from torch import nn

from torchmedic.observe.loop.events import ThrownAway


def backward(watch: ThrownAway, layer: nn.Linear) -> None:
    layer(torch.ones(2, 4)).sum().backward()
    watch.backward()


def test_gradients_of_other_parameters_are_not_added() -> None:
    """A model that is trained in two phases has gradients in other parameters after each."""
    first, second = nn.Linear(4, 3), nn.Linear(4, 5)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    watch = ThrownAway()
    for layer in (first, second):
        backward(watch, layer)
        watch.clearing(optimizer)
        optimizer.zero_grad()
    backward(watch, second)
    watch.step(optimizer)

    norms = watch.norms()
    assert norms is not None
    assert norms[1] == 2 * norms[0]
