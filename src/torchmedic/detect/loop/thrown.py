"""Updates that throw the weights of all layers far away, because the learning rate is too high."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from torchmedic.detect.loop.incident import LoopIncident, WeightsThrown
from torchmedic.observe.loop.events import Watched
from torchmedic.observe.loop.ledger import Habits
from torchmedic.observe.loop.overwrites import HIGH_RATE, rate_of
from torchmedic.source.spots import NOWHERE

_MIN_UPDATES = 24  # a loss that runs away is told sooner, with a proof
_MIN_GROWTH = 10.0
_MIN_LAYERS = 2  # a single matrix, as of a linear regression, may have to become large
_MIN_VALUES = 64  # of such a layer


def find(habits: Habits) -> Iterator[LoopIncident]:
    if habits.awake and not habits.is_ending and habits.steps < _MIN_UPDATES:
        return
    layers = {
        id(tensor)
        for model in habits.models
        for module in model.modules()
        if type(module).__module__.startswith("torch.nn.")
        for tensor in module._parameters.values()
        if tensor is not None and tensor.numel() >= _MIN_VALUES
    }
    is_clipped = any(event.kind == "clip" for event in habits.events)
    for number, watched in list(habits.optimizers.items()):
        steps = [event for event in habits.events if event.kind == "step" and event.who == number]
        rate = max(map(rate_of, watched.optimizer.param_groups)) if watched.optimizer is not None else 0.0
        if (
            len(steps) < _MIN_UPDATES
            or rate < HIGH_RATE
            or (is_clipped and isinstance(watched.optimizer, torch.optim.SGD))
        ):
            continue
        grown = _growth(watched, layers)
        if len(grown) >= _MIN_LAYERS and min(grown) >= _MIN_GROWTH:
            yield WeightsThrown(
                step=habits.steps,
                cause=watched.built or steps[-1].place,
                optimizer=number,
                update=steps[-1].place if steps else NOWHERE,
                updates=len(steps),
                rate=rate,
                growth=min(grown),
                layers=len(grown),
            )


def _growth(watched: Watched, layers: set[int]) -> list[float]:
    """How much larger the matrices of layers are than before the first update. Waits for the device.

    A matrix that began with smaller values than layers usually have is compared with the usual size.
    """
    first, now = watched.overwrites.first_sizes, watched.overwrites.sizes()
    matrices = watched.overwrites.matrices()
    if first is None or now is None or len(first) != len(now):
        return []
    known = zip(matrices, first.tolist(), now.tolist(), strict=True)
    # Values of 1 / sqrt(inputs): their norm is the root of the number of outputs.
    return [size / max(before, math.sqrt(len(tensor))) for tensor, before, size in known if id(tensor) in layers]
