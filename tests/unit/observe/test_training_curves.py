"""Recorded curves: bounded, whole for the steps they have, without a number that JSON cannot hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torchmedic.observe.budget import Account, Budget
from torchmedic.observe.device import async_devices
from torchmedic.observe.numbers.finite_checks import FiniteChecks, norm_of
from torchmedic.observe.numbers.late_norms import LateNorms
from torchmedic.observe.numbers.training_curves import TrainingCurves


class Known:
    """What a run knows at an update."""

    last_loss: float | None = 1.5
    last_key: Any = ("train.py", 9)
    gradient_norm: float | None = None
    is_rising = False

    def __init__(self) -> None:
        self.late_norms = LateNorms(Account(0.0, 100.0))


class Written(list[dict[str, Any]]):
    def __call__(self, kind: str, **fields: Any) -> bool:
        self.append({"kind": kind, **fields})
        return True

    @property
    def points(self) -> list[tuple[Any, ...]]:
        return [point for line in self for point in line["points"]]


@pytest.fixture
def optimizer() -> Any:
    return torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.125)


def test_a_long_run_has_few_points_that_reach_its_end(optimizer: Any) -> None:
    curves, written = TrainingCurves(), Written()
    curves.write = written
    for step in range(1_000_000):
        if step >= curves.due:
            curves.note(step, optimizer, Known())
            curves.flush()
    steps = [point[0] for point in written.points]
    assert steps[:1000] == list(range(1000))
    assert len(steps) < 12_000
    assert steps[-1] > 998_000
    assert written.points[0] == (0, 1.5, 0.125, None, 0)


def test_all_optimizers_of_a_step_are_noted_or_none(optimizer: Any) -> None:
    curves, written = TrainingCurves(), Written()
    curves.write = written
    one, two = Known(), Known()
    two.last_key = ("train.py", 14)
    for step in range(5000):
        for known in (one, two):
            if step >= curves.due:
                curves.note(step, optimizer, known)
        curves.flush()
    by_place = [[point[0] for point in written.points if point[4] == place] for place in (0, 1)]
    assert by_place[0] == by_place[1]
    assert written[-1]["places"] == ["train.py:9", "train.py:14"]


def test_steps_of_a_rising_loss_are_noted_between_the_others(optimizer: Any) -> None:
    curves, written = TrainingCurves(), Written()
    curves.write = written
    calm, rising = Known(), Known()
    rising.is_rising = True
    for step in range(3000):
        known = rising if 2500 <= step < 2510 else calm
        if step >= curves.due or known.is_rising:
            curves.note(step, optimizer, known)
    curves.flush()
    assert set(range(2500, 2510)) <= {point[0] for point in written.points}


def test_what_is_not_finite_is_written_as_unknown(optimizer: Any) -> None:
    curves, written = TrainingCurves(), Written()
    known = Known()
    known.last_loss, known.gradient_norm = math.nan, math.inf
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    curves.note(0, optimizer, known)
    curves.flush()  # nobody to write to yet
    curves.write = written
    curves.flush()
    assert written.points == [(0, None, 0.5, None, 0)]


def test_points_that_nobody_writes_do_not_pile_up(optimizer: Any) -> None:
    curves = TrainingCurves()
    rising = Known()
    rising.is_rising = True
    for step in range(20_000):
        curves.note(step, optimizer, rising)
    assert len(curves._points) <= 4000


def test_the_norm_is_that_of_all_gradients_and_missing_where_one_is_bad() -> None:
    parts = [torch.randn(3, 4), torch.randn(5, dtype=torch.float64), torch.randn(7).bfloat16()]
    wanted = math.sqrt(sum(float(part.double().square().sum()) for part in parts))
    assert norm_of(parts) == pytest.approx(wanted, rel=1e-2)
    budget = FiniteChecks(Budget().finite)
    assert not budget.any_bad(parts)
    assert budget.norm == pytest.approx(wanted, rel=1e-2)
    for bad in (math.nan, math.inf, -math.inf):
        spoiled = [*parts, torch.tensor([1.0, bad])]
        assert norm_of(spoiled) is None
        assert budget.any_bad(spoiled)
        assert budget.norm is None
    large = [torch.full((4,), 3e38), torch.tensor([60_000.0, 60_000.0]).half()]  # the norm overflows, no element does
    assert not budget.any_bad(large)
    assert not budget.any_bad([torch.zeros(3, dtype=torch.complex64)])
    assert budget.any_bad([torch.tensor([complex(math.nan, 0)])])


class LateDevice:
    """A device whose copies arrive when `deliver` is called."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.working = True

    def may_work(self) -> bool:
        return self.working

    def place(self, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        return torch.full((), math.nan, dtype=dtype), self

    def arrange(self, host: torch.Tensor, event: Any, value: torch.Tensor) -> None:
        self.copies.append((host, value))

    def query(self) -> bool:
        return not self.copies

    def deliver(self) -> None:
        for host, value in self.copies:
            host.copy_(value)
        self.copies.clear()


def test_a_norm_of_a_late_device_is_a_point_of_the_step_it_was_begun_in(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice()
    monkeypatch.setitem(async_devices.devices, "cpu", device)
    (weights,) = optimizer.param_groups[0]["params"]
    curves, written, known = TrainingCurves(), Written(), Known()
    curves.write = written
    for step in range(40):
        weights.grad = torch.tensor([3.0, 4.0]) * (step + 1)
        if step == 20:
            device.deliver()
        device.working = step != 20  # a graph is being captured
        curves.note(step, optimizer, known)
    device.deliver()
    curves.note(40, optimizer, known)
    curves.flush()
    norms = {point[0]: point[3] for point in written.points if point[3] is not None}
    assert norms == {0: 5.0, 28: 145.0}  # none while one is under way, and none that a graph would capture
    assert [point[0] for point in written.points if point[1] is not None] == list(range(41))


def test_norms_that_would_be_another_number_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice()
    monkeypatch.setitem(async_devices.devices, "cpu", device)
    for gradients, wanted in (
        ([torch.ones(2, dtype=torch.complex64)], 0),
        ([torch.full((4,), 6e4, dtype=torch.half), torch.full((4,), 6e4)], 1),
    ):
        weights = [torch.nn.Parameter(torch.zeros_like(each)) for each in gradients]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        norms = LateNorms(Account(0.0, 100.0))
        norms.begin(0, torch.optim.SGD(weights, lr=0.1))
        assert len(device.copies) == wanted
        if wanted:
            device.deliver()
            assert norms.arrived() == (0, pytest.approx(6e4 * math.sqrt(8)))
            assert norms.arrived() is None
