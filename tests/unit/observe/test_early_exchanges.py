"""An exchange of gradients before their backward is noticed; one after it is not."""

from __future__ import annotations

import sys

import torch

from torchmedic.observe.ranks.early_exchanges import EarlyExchanges
from torchmedic.observe.step.clock import Clock


def parts() -> tuple[torch.optim.Optimizer, torch.Tensor, Clock, EarlyExchanges]:
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    clock = Clock()
    return torch.optim.SGD([weight], lr=0.1), weight.grad, clock, EarlyExchanges(clock)


def test_an_exchange_before_the_backward() -> None:
    optimizer, gradient, clock, exchanges = parts()
    assert not exchanges.at_update(optimizer)
    exchanges.exchanged([gradient.data], sys._getframe())
    clock.micro_step = 1
    found = exchanges.at_update(optimizer)
    assert found[0].function == "test_an_exchange_before_the_backward"
    exchanges.exchanged([gradient], sys._getframe())  # the step is not closed yet, and no backward came since
    clock.micro_step = 2
    assert exchanges.at_update(optimizer)


def test_an_exchange_after_the_backward_or_of_something_else_is_left_alone() -> None:
    optimizer, gradient, clock, exchanges = parts()
    assert not exchanges.at_update(optimizer)
    exchanges.exchanged([torch.ones(3)], sys._getframe())
    exchanges.exchanged(None, sys._getframe())
    assert not exchanges.at_update(optimizer)
    exchanges.exchanged([gradient], sys._getframe())
    clock.micro_step = 1
    exchanges.exchanged([gradient], sys._getframe())
    assert not exchanges.at_update(optimizer)
    clock.step, clock.micro_step = 1, 1
    exchanges.exchanged([gradient], sys._getframe())
    assert not exchanges.at_update(optimizer)
