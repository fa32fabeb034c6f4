"""Loss, learning rate and gradient norm over the steps, for a report to draw: lines of kind `curves` in events.jsonl.

    {"kind": "curves", "time": .., "places": ["/home/me/train.py:12"],
     "points": [[step, loss, learning rate, gradient norm, place], ..]}

A point consists of what the other watches know at an update of the weights; nothing is awaited for it. What is not
known is null. A norm that was computed on a GPU comes later, as a point of its own with the number of its step. `place`
is the line that called backward, as an index into `places`: the losses of a GAN are two curves. Every step is noted at
first, and fewer and fewer later: a million steps are about 10,000 points.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, NamedTuple, Protocol

import torch

from torchmedic.observe.numbers.late_norms import LateNorms

_POINTS_PER_STRIDE = 1000
# Steps between two points. Primes, so that a loop with a period of its own is not met at the same phase every time.
_STRIDES = (1, 2, 5, 11, 23, 47, 97, 197, 397, 797, 1597, 3203, 6421, 12_853, 25_717)
_MAX_PENDING = 4 * _POINTS_PER_STRIDE  # points that are not written yet
_WRITE_SECONDS = 1.0  # between two lines
_MAX_PLACES = 8


class Numbers(Protocol):
    """What is known at an update."""

    @property
    def last_loss(self) -> float | None: ...
    @property
    def last_key(self) -> Any:
        """File and line of the call of backward."""

    @property
    def gradient_norm(self) -> float | None: ...
    @property
    def late_norms(self) -> LateNorms:
        """For gradients on a device that is read late."""

    @property
    def is_rising(self) -> bool: ...


class _Point(NamedTuple):
    step: int
    loss: float | None
    rate: float | None
    norm: float | None
    place: int | None


class TrainingCurves:
    """Notes a point at some of the updates, and writes the points now and then."""

    def __init__(self) -> None:
        self.due = 0  # the step from which on `note` wants to be called
        self.write: Callable[..., object] | None = None
        self._at = -1  # the step that was noted last
        self._count = 0
        self._points: list[_Point] = []
        self._places: dict[Any, int] = {}
        self._due_write = 0.0

    def note(self, step: int, optimizer: Any, numbers: Numbers) -> None:
        """An optimizer is about to update its weights. All optimizers of a step are noted, or none."""
        if step > self._at:
            stride = self._stride()
            if step < self._at + stride and not numbers.is_rising:
                self.due = self._at + stride
                return
            self._at = self.due = step
            self._count += 1
        if len(self._points) < _MAX_PENDING:
            place = self._place(numbers.last_key)
            self._points.append(_Point(step, numbers.last_loss, _rate(optimizer), numbers.gradient_norm, place))
            if (late := numbers.late_norms.arrived()) is not None:
                self._points.append(_Point(late[0], None, None, late[1], None))
        numbers.late_norms.begin(step, optimizer)

    def passed(self, first: int, losses: list[float], key: Any) -> None:
        """Some steps in a row are over, of which only the losses are known."""
        end, place = first + len(losses), self._place(key)
        step = max(first, self._at + self._stride())
        while step < end and len(self._points) < _MAX_PENDING:
            self._at = self.due = step
            self._count += 1
            self._points.append(_Point(step, losses[step - first], None, None, place))
            step += self._stride()

    def _stride(self) -> int:
        return _STRIDES[min(self._count // _POINTS_PER_STRIDE, len(_STRIDES) - 1)]

    def _place(self, key: Any) -> int | None:
        place = self._places.get(key)
        if place is None and key is not None and len(self._places) < _MAX_PLACES:
            place = self._places[key] = len(self._places)
        return place

    def flush(self, now: float | None = None) -> None:
        """Write what was noted; with a time, only if the last line is old enough."""
        if now is not None and now < self._due_write:
            return
        if self.write is None or not self._points:
            return
        self._due_write = (now or 0.0) + _WRITE_SECONDS
        points, self._points = self._points, []
        self.write(
            "curves",
            places=[f"{key[0]}:{key[1]}" for key in self._places],
            points=[
                (point.step, _short(point.loss), _short(point.rate), _short(point.norm), point.place)
                for point in points
            ],
        )

    def forked(self) -> None:
        """Leave to the parent process what it has noted."""
        self.write = None
        self._points = []


def _rate(optimizer: Any) -> float | None:
    """The learning rate of the first group, if it can be read without waiting."""
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if isinstance(rate, torch.Tensor):
        return float(rate.item()) if rate.is_cpu and rate.numel() == 1 else None
    return float(rate) if isinstance(rate, float | int) else None


def _short(value: float | None) -> float | None:
    """A number with six figures; None instead of NaN and infinity, which JSON does not have."""
    return float(f"{value:.6g}") if value is not None and isfinite(value) else None
