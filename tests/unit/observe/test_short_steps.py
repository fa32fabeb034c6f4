"""Which short steps are noted in full, and the one gradient that is looked at in all of them."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchmedic.observe.budget import Account, Budget
from torchmedic.observe.device import async_devices
from torchmedic.observe.hooks.current_step import ShortSteps
from torchmedic.observe.numbers.finite_checks import FiniteChecks, Witness, cheapest_witness, is_bad_witness, is_fine

BAD = (math.nan, math.inf, -math.inf)


def full_steps(seconds: float, count: int, alarm: int = 0, *, is_late: bool = False) -> list[int]:
    """The steps of a run that are noted in full, if each takes so long."""
    clock: Any = SimpleNamespace(step=0, usual_step=seconds)
    losses = SimpleNamespace(alarm=alarm, late=SimpleNamespace(are_usual=is_late))
    finite: Any = SimpleNamespace(losses=losses)
    short_steps = ShortSteps(clock, finite)
    found = []
    for step in range(count):
        clock.step = step
        if not short_steps.applies():
            found.append(step)
    return found


def test_one_of_many_short_steps_is_noted_in_full() -> None:
    noted = full_steps(0.001, 2000)
    assert noted[:301] == list(range(301))
    assert {later - step for step, later in pairwise(noted[301:])} == {192}


@pytest.mark.parametrize(("seconds", "between"), [(0.0001, 192), (0.005, 64), (0.01, 32), (0.02, 6), (0.04, 3)])
def test_the_longer_the_step_the_more_are_noted(seconds: float, between: int) -> None:
    noted = full_steps(seconds, 2000)[302:]
    assert {later - step for step, later in pairwise(noted)} == {between}


@pytest.mark.parametrize(("seconds", "alarm"), [(0.06, 0), (1.0, 0), (0.001, 5)])
def test_long_steps_and_steps_with_an_alarm_are_all_noted(seconds: float, alarm: int) -> None:
    assert full_steps(seconds, 1000, alarm) == list(range(1000))


def test_on_a_late_device_only_very_short_steps_are_left_out() -> None:
    assert full_steps(0.03, 1000, is_late=True) == list(range(1000))
    assert len(full_steps(0.01, 1000, is_late=True)) < 400
    noted = full_steps(0.001, 2000, is_late=True)[301:]
    assert {later - step for step, later in pairwise(noted)} == {64}  # so many losses are held


def test_a_run_that_becomes_slow_is_noted_in_full_at_once() -> None:
    clock: Any = SimpleNamespace(step=1000, usual_step=0.001)
    finite: Any = SimpleNamespace(losses=SimpleNamespace(alarm=0, late=SimpleNamespace(are_usual=False)))
    short_steps = ShortSteps(clock, finite)
    assert [short_steps.applies() for clock.step in (1000, 1001, 1002)] == [False, True, True]
    clock.usual_step = 0.08
    assert not short_steps.applies()


@pytest.mark.parametrize("late", [True, False])
def test_ranks_that_differ_in_speed_note_the_same_steps_in_full(late: bool) -> None:
    full: list[set[int]] = []
    for usual in (0.0015, 0.0017, 0.005, 0.0061):
        clock: Any = SimpleNamespace(step=1000, usual_step=usual)
        losses = SimpleNamespace(alarm=0, late=SimpleNamespace(are_usual=late))
        short_steps = ShortSteps(clock, SimpleNamespace(losses=losses))  # type: ignore[arg-type]
        short_steps.is_of_ranks = True
        full.append({clock.step for clock.step in range(1000, 3000) if not short_steps.applies()})
    assert full[0] == full[1] <= full[2] == full[3]
    assert max(b - a for a, b in pairwise(sorted(full[0]))) == (64 if late else 128)


def test_an_account_recovers_by_its_share_and_saves_no_more_than_when_full() -> None:
    now = [0.0]
    account = Account(0.01, 0.5, lambda: now[0])
    now[0] = 1000.0  # a pause
    assert account.left == 0.5
    account.spend(0.75)
    assert account.left == -0.25
    now[0] += 10.0
    assert account.left == pytest.approx(-0.15)
    now[0] += 1000.0
    assert account.left == 0.5
    assert account.spent == 0.75


def test_all_checks_together_take_a_small_share_of_a_long_run() -> None:
    now = [0.0]
    budget = Budget(lambda: now[0])
    for _ in range(100_000):  # every account is asked in every step, and each check takes 3 ms
        now[0] += 0.01
        for account in budget.accounts().values():
            if account.left > 0:
                account.spend(0.003)
    spent = sum(account.spent for account in budget.accounts().values())
    assert 0.003 * now[0] < spent < 0.004 * now[0]


def trained(*layers: nn.Module, dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    model = nn.Sequential(*layers).to(dtype)
    optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
    model(torch.randn(3, 4, dtype=dtype)).sum().backward()
    return optimizer


def test_the_bias_of_the_first_trained_layer_is_looked_at() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    optimizer = trained(frozen, nn.Linear(4, 4), nn.Linear(4, 2))
    assert cheapest_witness(optimizer)[:2] == (3, True)
    assert cheapest_witness(trained(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))) == Witness(0, False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_bad_gradient_is_not_fine(bias: bool, bad: float, dtype: torch.dtype) -> None:
    optimizer = trained(nn.Linear(4, 4, bias=bias), nn.Linear(4, 2), dtype=dtype)
    witness = cheapest_witness(optimizer)
    assert (witness.plain is not None) is bias
    for place in range(4):
        assert is_fine(optimizer, witness)
        assert not is_bad_witness(optimizer, witness)
        gradient = optimizer.param_groups[0]["params"][witness.place].grad.view(-1)
        good, gradient[place] = gradient[place].item(), bad
        assert not is_fine(optimizer, witness)
        assert is_bad_witness(optimizer, witness)
        gradient[place] = good


def test_a_gradient_of_another_kind_is_looked_at_by_an_operation() -> None:
    optimizer = trained(nn.Linear(4, 4))
    witness, bias = cheapest_witness(optimizer), optimizer.param_groups[0]["params"][1]
    bias.grad = torch.ones(8)[::2]  # not contiguous
    assert is_fine(optimizer, witness)
    bias.grad[3] = math.nan
    assert not is_fine(optimizer, witness)
    bias.data = torch.zeros(9)
    bias.grad = torch.full((9,), math.inf)
    assert not is_fine(optimizer, witness)


def test_a_large_gradient_is_looked_at_again_and_found_good() -> None:
    optimizer = trained(nn.Linear(4, 4))
    witness = cheapest_witness(optimizer)
    optimizer.param_groups[0]["params"][1].grad.fill_(3e38)  # the sum is infinite
    assert not is_fine(optimizer, witness)
    assert not is_bad_witness(optimizer, witness)


def test_a_bad_rate_is_not_fine() -> None:
    optimizer = trained(nn.Linear(4, 4))
    optimizer.param_groups[0]["lr"] = math.nan
    assert not is_fine(optimizer, cheapest_witness(optimizer))


def test_nothing_is_read_from_a_device_that_is_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = trained(nn.Linear(4, 4))
    witness = cheapest_witness(optimizer)
    monkeypatch.setitem(async_devices.devices, "cpu", None)
    assert not is_fine(optimizer, witness)


def test_parameters_may_be_taken_away_and_gradients_cleared() -> None:
    optimizer = trained(nn.Linear(4, 4), nn.Linear(4, 2))
    parameters = optimizer.param_groups[0]["params"]
    shorter = Witness(7, True)  # of a list that has become shorter since
    assert not is_fine(optimizer, shorter)
    assert not is_bad_witness(optimizer, shorter)
    parameters[1].grad = None
    assert is_fine(optimizer, Witness(1, True))
    parameters[1].grad = torch.ones(4, requires_grad=True)  # of `create_graph`
    assert not is_fine(optimizer, Witness(1, True))
    assert not is_bad_witness(optimizer, Witness(1, True))


def test_a_used_up_budget_looks_at_all_gradients_in_turn() -> None:
    optimizer = trained(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    account = Budget().finite
    budget = FiniteChecks(account)
    assert not budget.any_bad_gradient(optimizer)
    assert budget.norm is not None
    account.spend(math.inf)
    optimizer.param_groups[0]["params"][4].grad[1] = math.nan
    optimizer.param_groups[0]["params"][3].data[0] = math.nan
    found, weights = 0, 0
    for _ in range(7 * 32):
        if budget.is_due():
            found += budget.any_bad_gradient(optimizer)
            weights += budget.any_bad_weight(optimizer, set())
            assert budget.norm is None
            assert not budget.any_bad_weight(optimizer, {id(optimizer.param_groups[0]["params"][3])})
    assert (found, weights) == (1, 1)
