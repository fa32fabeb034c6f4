"""Whether backward goes through what a frame was computing is read off the source, name by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from torchmedic.evidence.memory.source.differentiated import is_differentiated
from torchmedic.source.live_frames import frames_of


class Stopped(Exception):
    """The model has no memory."""


class Model:
    log_probabilities: list[Any] = []  # noqa: RUF012
    history_of_losses: list[Any] = []  # noqa: RUF012

    def __call__(self, x: Any) -> Any:
        raise Stopped


def is_bound(run: Callable[[Any], Any], model: Any = None) -> bool:
    try:
        run(model or Model())
    except Stopped:
        frames = frames_of(sys.exc_info()[2])
    mine = [frame for frame in frames if frame.file == __file__]
    return is_differentiated(mine[1:-1])  # without this function and without the model


def trained(model: Any) -> None:
    for x in range(3):
        out = model(x)
        loss = out * 2
        loss.backward()


def validated_after_training(model: Any) -> float:
    loss, total = Any, 0.0
    for epoch in range(3):
        for x in range(0):
            loss = model(x)
            loss.backward()
        for x in range(3):
            loss = model(x) + epoch
            total += loss.item()
    return total


def summed(model: Any) -> None:
    losses = []
    for x in range(3):
        losses.append(model(x))
    sum(losses).backward()


def collected(model: Any) -> list[Any]:
    kept = []
    for x in range(3):
        kept.append(model(x).detach())
    kept[0].backward()
    return kept


def loss_of(model: Any, x: Any) -> Any:
    return (model(x) - 1) ** 2


def trained_by_a_helper(model: Any) -> None:
    loss = loss_of(model, 1)
    scaled = [loss / 4]
    scaled[0].backward()


def measured_by_a_helper(model: Any) -> bool:
    return bool(loss_of(model, 1) > 3)


def yielded(model: Any) -> Iterator[Any]:
    for x in range(3):
        yield model(x)


def scored(model: Any) -> float:
    return sum(float(each) for each in yielded(model))


def trained_on_what_is_yielded(model: Any) -> None:
    for each in yielded(model):
        each.backward()


def stored(model: Any) -> None:
    model.loss_that_is_stored = model(1)


def differentiates_what_is_stored(model: Any) -> None:
    model.loss_that_is_stored.backward()


def cast(model: Any) -> None:
    loss = model(1).float().mean()
    loss.backward()


def captured(model: Any) -> None:
    out = model(1)

    def closure() -> None:
        (out * 2).backward()

    closure()


def remembered(model: Any) -> None:
    model.log_probabilities.append(model(1))


def learns_from_what_is_remembered(policy: Any) -> None:
    losses = [-each * 2 for each in policy.log_probabilities]
    total = sum(losses)
    total.backward()


def logged(model: Any) -> None:
    model.history_of_losses.append(model(1))


def trains_and_logs(model: Any, loss: Any) -> None:
    model.history_of_losses.append(loss.item())
    loss.backward()


def given_to_a_trainer(model: Any) -> None:
    update(model(1))


def update(loss: Any) -> None:
    loss.backward()


class Meter:
    total = 0

    def update_average(self, value: Any) -> None:
        self.total += value


def given_to_a_meter(model: Any) -> Any:
    meter = Meter()
    for x in range(3):
        meter.update_average(model(x))
    return meter


@pytest.mark.parametrize(
    "run",
    [
        trained,
        summed,
        trained_by_a_helper,
        trained_on_what_is_yielded,
        stored,
        given_to_a_trainer,
        cast,
        captured,
        remembered,
    ],
)
def test_what_is_trained_on(run: Callable[[Any], Any]) -> None:
    assert is_bound(run)


@pytest.mark.parametrize(
    "run", [validated_after_training, collected, measured_by_a_helper, scored, given_to_a_meter, logged]
)
def test_what_no_backward_follows(run: Callable[[Any], Any]) -> None:
    assert not is_bound(run)
