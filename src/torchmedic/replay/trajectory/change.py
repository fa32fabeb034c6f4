"""The one thing that is changed when steps are run again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from torchmedic.replay.trajectory.terms import Factor

Gradients = list[tuple[torch.Tensor, torch.Tensor]]


class Change(NamedTuple):
    """The one thing that is different from what happened."""

    name: str
    rate: float = 1.0  # factor of every learning rate
    only: Any = None  # the optimizer whose rate is meant; None: all
    group: int | None = None  # of that optimizer, whose rate is meant; None: all
    clip: float | None = None  # largest norm of all gradients
    gradient: float = 1.0  # factor of every gradient, which is that of the loss
    options: Mapping[str, Any] = MappingProxyType({})  # of the optimizers
    fresh: bool = False  # the optimizers begin without a state: what they had was made with the options of then
    without: int | None = None  # step whose batch is left out
    term: Factor | None = None  # one term of the loss, and the factor of its gradient
    data: Callable[[dict[str, Any]], None] | None = None  # changes the variables that every step begins with


AS_IT_WAS = Change("as it was")
NO_UPDATE = Change("without any update", rate=0.0)
OTHER_SIGN = Change("the other sign", gradient=-1.0)


def changed_gradients(gradients: Gradients, change: Change) -> Gradients:
    """Gradients as a change wants them."""
    changed = [(tensor, gradient * change.gradient) for tensor, gradient in gradients]
    if change.clip is not None:
        norm = math.sqrt(sum(float(values_of(gradient).double().square().sum()) for _, gradient in changed))
        factor = min(1.0, change.clip / (norm + 1e-6))
        changed = [(tensor, gradient * factor) for tensor, gradient in changed]
    return changed


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """The values of a gradient, which an embedding may have made sparse."""
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient


def are_finite(gradients: Gradients) -> bool:
    return all(bool(torch.isfinite(values_of(gradient)).all()) for _, gradient in gradients)
