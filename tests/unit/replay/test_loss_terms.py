"""The terms of a loss, and a rerun that is only alike."""

from __future__ import annotations

import math

import pytest
import torch

from torchmedic.replay.trace.microscope import Microscope
from torchmedic.replay.trajectory.repetition import grow_alike
from torchmedic.replay.trajectory.terms import terms_of, weakened


def _losses(weight: torch.Tensor) -> tuple[torch.Tensor, Microscope]:
    scope = Microscope(deadline=math.inf)
    with scope:
        loss = (weight.square().sum() + 60 * sum(part.abs() for part in weight) - weight.mean() / 4) / 2
    scope.read()
    return loss, scope


def test_a_multiplied_sum_is_one_term() -> None:
    loss, scope = _losses(torch.ones(3, requires_grad=True))
    assert [term.weight for term in terms_of(loss, scope)] == [0.5, 30.0, 0.125]
    assert [term.size for term in terms_of(loss, scope)] == [3.0, 180.0, 0.25]


def test_the_terms_behind_a_mean_are_terms_of_the_loss() -> None:
    weight = torch.ones(3, requires_grad=True)
    with Microscope(deadline=math.inf) as scope:
        loss = -(weight.exp() - 8 * weight.square()).mean()
    scope.read()
    assert [term.weight for term in terms_of(loss, scope)] == [1.0, 8.0]
    with Microscope(deadline=math.inf) as scope:
        loss = weight.square().mean()
    scope.read()
    assert [term.path for term in terms_of(loss, scope)] == [()]


def test_only_the_gradient_of_one_term_is_multiplied() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss, scope = _losses(weight)
    heavy = max(terms_of(loss, scope), key=lambda term: term.weight)
    with weakened((heavy.path, 0.1)):
        loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([1.0 + 3.0 - 1 / 24] * 3)


@pytest.mark.parametrize(
    ("losses", "alike"),
    [
        ([3.0, 93.0, 129.0, 133.0], True),
        ([3.0, 93.0, 129.0, math.inf], False),
        ([3.0, 3.1, 3.0, 2.9], False),
        ([3.0, -93.0, 129.0, 133.0], False),
        ([3.0, 93.0], False),
    ],
)
def test_losses_that_grow_alike(losses: list[float], alike: bool) -> None:
    assert grow_alike(losses, [3.02, 98.0, 112.0, 130.0]) is alike


def test_an_overflow_that_both_end_in_counts_as_alike() -> None:
    assert grow_alike([3.0, 93.0, 129.0, math.inf], [3.02, 98.0, 112.0, math.nan])
    assert not grow_alike([3.0, 93.0, 129.0, 133.0], [3.02, 98.0, 112.0, math.nan])
