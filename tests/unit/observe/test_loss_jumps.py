"""A jump of the loss after which layers get no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchmedic.observe.numbers.loss_trend import LossJumps


def _optimizer(dead: int) -> torch.optim.SGD:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    for at, layer in enumerate(model):
        layer.weight.grad = torch.zeros(4, 4) if at < dead else torch.ones(4, 4)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _has_killed(jumps: LossJumps, optimizer: torch.optim.SGD) -> list[bool]:
    found = []
    while jumps.updates_left:
        found.append(jumps.has_killed(optimizer, loss=1.0, is_readable=True))
    return found


@pytest.mark.parametrize(
    ("loss", "dead", "expected"), [(50.0, 2, True), (50.0, 1, False), (1e5, 1, True), (1e5, 0, False)]
)
def test_dead_layers_after_a_jump(loss: float, dead: int, expected: bool) -> None:
    jumps = LossJumps()
    jumps.note(loss, 1.0, list)
    looks = _has_killed(jumps, _optimizer(dead))
    assert looks[-1] is expected
    assert not any(looks[:-1])


def test_a_loss_that_only_rises_is_no_jump() -> None:
    jumps = LossJumps()
    jumps.note(5.0, 1.0, list)
    assert jumps.updates_left == 0


def test_only_some_jumps_are_followed() -> None:
    jumps = LossJumps()
    for _ in range(4):
        jumps.note(50.0, 1.0, list)
        _has_killed(jumps, _optimizer(0))
    jumps.note(50.0, 1.0, list)
    assert jumps.updates_left == 0


def test_a_loss_of_zero_has_no_gradient_and_nothing_is_dead() -> None:
    jumps = LossJumps()
    jumps.note(1e5, 1.0, list)
    for _ in range(40):
        assert not jumps.has_killed(_optimizer(2), loss=0.0, is_readable=True)
    assert jumps.has_killed(_optimizer(2), loss=1.0, is_readable=True)
