"""Looks at an optimizer: how far its rate has fallen, and whether its updates change the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchmedic.observe.device import async_devices
from torchmedic.observe.loop.standstill import Standstill


class LateCpu:
    """Stands for a device whose copies arrive when the test says so."""

    def __init__(self) -> None:
        self.under_way: list[tuple[torch.Tensor, torch.Tensor]] = []

    def may_work(self) -> bool:
        return True

    def places(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        return torch.empty(count, dtype=dtype), None

    def arrange_many(self, host: torch.Tensor, event: Any, values: torch.Tensor) -> None:
        self.under_way.append((host, values.clone()))

    def arrive(self) -> None:
        for host, values in self.under_way:
            host[: values.numel()].copy_(values)


def trained(dtype: torch.dtype, rate: float, watch: Standstill, updates: int, *, factor: float = 1.0) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(1, updates + 1):
        optimizer.zero_grad()
        model(torch.randn(8, 16, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= factor
        if step >= watch.due:
            watch.stepped(optimizer, step)
    return optimizer


def watching(asked: list[int]) -> Standstill:
    watch = Standstill(lambda: asked.append(1), lambda: None)
    watch.start()
    return watch


def test_updates_that_are_rounded_away_are_counted() -> None:
    asked: list[int] = []
    watch = watching(asked)
    known = watch.of(trained(torch.bfloat16, 1e-6, watch, 40))
    assert known is not None
    assert known.moves is not None
    assert asked
    assert (known.moves.since, known.moves.until) == (4, 20)
    assert sum(layer.moved for layer in known.moves.layers) == 0
    assert sum(layer.graded for layer in known.moves.layers) > 200


def test_weights_that_move_are_looked_at_once_and_nobody_is_asked() -> None:
    asked: list[int] = []
    watch = watching(asked)
    known = watch.of(trained(torch.float32, 0.1, watch, 100))
    assert known is not None
    assert known.is_decided
    assert not asked
    assert [each.step for each in known.rates] == [1, 4, 20, 36, 60, 90]
    assert watch.due == 135


def test_a_rate_that_rises_puts_the_decision_off() -> None:
    watch = watching([])
    known = watch.of(trained(torch.bfloat16, 1e-8, watch, 59, factor=1.02))
    assert known is not None
    assert not known.is_decided


def test_the_counts_of_a_late_device_are_read_at_a_later_look(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateCpu()
    monkeypatch.setitem(async_devices.devices, "cpu", late)
    watch = watching([])
    optimizer = trained(torch.bfloat16, 1e-6, watch, 20)
    known = watch.of(optimizer)
    assert known is not None
    assert late.under_way
    assert known.moves is None
    late.arrive()
    assert known.look(36)
    assert known.moves is not None
    assert known.moves.until == 20


def test_a_rate_that_has_fallen_is_dated_from_the_first_look_that_saw_it() -> None:
    watch = watching([])
    known = watch.of(trained(torch.float32, 0.1, watch, 140, factor=0.8))
    since = known.nothing_since() if known is not None else None
    assert since is not None
    assert since.step == 60


def test_a_rate_that_has_come_back_is_no_fallen_rate() -> None:
    watch = watching([])
    optimizer = trained(torch.float32, 0.1, watch, 140, factor=0.8)
    optimizer.param_groups[0]["lr"] = 0.1
    watch.ending(150)
    known = watch.of(optimizer)
    assert known is not None
    assert known.nothing_since() is None
