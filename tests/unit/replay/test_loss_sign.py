"""What a loss mostly consists of: its sign, and whether that is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchmedic.replay.trace.microscope import Microscope
from torchmedic.replay.trajectory.loss_sign import LossSign, sign_of_loss

_weight = torch.linspace(-1.0, 2.0, 12).reshape(3, 4).requires_grad_()
_x, _y, _label = torch.ones(5, 3), torch.full((5, 4), 0.3), torch.tensor([0, 1, 2, 3, 0])


def _sign(make: Callable[[Tensor], Tensor]) -> LossSign:
    with Microscope() as scope:
        loss = make(_x @ _weight)
    scope.read()
    return sign_of_loss(loss, scope)


@pytest.mark.parametrize(
    "make",
    [
        lambda out: -F.mse_loss(out, _y),
        lambda out: torch.log_softmax(out, 1).gather(1, _label[:, None]).mean(),
        lambda out: -F.cross_entropy(out, _label),
        lambda out: (-0.5 * (out - _y) ** 2).sum(1).mean(),
        lambda out: -(out - _y).norm(dim=1).mean(),
        lambda out: 1e-6 * out.mean() - 100 * (out - _y).abs().sum(),
        lambda out: -(difference := out - _y).mul(difference).mean(),
    ],
)
def test_errors_with_the_wrong_sign(make: Callable[[Tensor], Tensor]) -> None:
    found = _sign(make)
    assert (found.sign, found.is_error) == (-1, True)


@pytest.mark.parametrize(
    ("make", "sign"),
    [
        (lambda out: -out.pow(2).mean(), -1),
        (lambda out: -F.relu(out).mean(), -1),
        (lambda out: F.mse_loss(out, _y) + out.exp().sum(), 1),
    ],
)
def test_a_known_sign_that_is_no_error(make: Callable[[Tensor], Tensor], sign: int) -> None:
    found = _sign(make)
    assert (found.sign, found.is_error) == (sign, False)


@pytest.mark.parametrize(
    "make",
    [
        lambda out: -out.mean(),  # a reward, or the score of a critic
        lambda out: -(torch.log_softmax(out, 1)[:, 0] * torch.tensor([1.0, -1.0, 2.0, 0.5, -3.0])).mean(),
        lambda out: F.mse_loss(out, _y) - F.l1_loss(out, _y),
        lambda out: (out**3).sum(),
    ],
)
def test_a_sign_that_is_open(make: Callable[[Tensor], Tensor]) -> None:
    assert _sign(make).sign == 0
