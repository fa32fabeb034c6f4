"""What looks at one optimizer show: its learning rates, and whether its updates change the weights at all.

Each look reads the learning rates. Until that is decided, a look also compares samples of the weights with copies from
an earlier look. The counts of a device that is read late are copied to the host and read at the next look.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchmedic.observe.device import async_devices
from torchmedic.observe.loop.weight_samples import Sample, counts_of, samples_of
from torchmedic.source.spots import Place

FIRST_LOOKS = (1, 4, 20, 36, 60)  # steps
_MAX_RATES = 64  # looks whose rates are kept
_MIN_UPDATES = 12  # between the copy and the look that decides
_MAX_COPIES = 8  # times that weights are copied, as in a long warm-up
MAX_DEAD_SHARE = 1e-4  # of the largest rate, with which nothing is learned any more
_MAX_SMALL_SHARE = 0.1  # of the rate with which an optimizer was built
MAX_PLAIN_RATE = 0.1  # a factor that is as large may be meant as one
DOUBTFUL_CHANGE = 1e-6  # of weights, per update: a million updates change them as a whole
_COUNTS = 5  # numbers per tensor


class Rate(NamedTuple):
    """The largest learning rate of an optimizer after a step."""

    step: int
    rate: float


class LayerMoves(NamedTuple):
    """What the updates did to one tensor: of the sampled elements, those with a gradient, and those that changed."""

    reference: weakref.ref[torch.Tensor]
    dtype: torch.dtype
    is_matrix: bool
    rate: float
    graded: int
    moved: int  # of those with a gradient
    largest_gradient: float
    largest_before: float  # gradient when the weights were copied
    change: float  # the largest, relative to the largest weight


class Moves(NamedTuple):
    """What the updates between two steps did to the weights of one optimizer."""

    since: int
    until: int
    layers: list[LayerMoves]

    @property
    def are_doubtful(self) -> bool:
        """Whether some layer has a gradient and did not change as a whole, or all changed next to nothing."""
        return any(2 * layer.moved < layer.graded for layer in self.layers) or self.change < DOUBTFUL_CHANGE

    @property
    def change(self) -> float:
        """The largest change of any matrix per update, relative to its largest weight."""
        changes = [layer.change for layer in self.layers if layer.is_matrix and math.isfinite(layer.change)]
        return max(changes, default=math.inf) / max(1, self.until - self.since)


class Warming(NamedTuple):
    """What the end of a run may need to know of a rate that rises."""

    cause: Place
    update: Place
    optimizer: int
    meant: float  # the rate with which the optimizer was built, or the largest of its schedule
    length: int  # of a schedule of one cycle, in moves; 0 where there is none
    moves: int  # of this schedule
    moved: Place | None = None  # the line that has this schedule move


class _Pending(NamedTuple):
    """Counts that are on their way to the host."""

    step: int
    host: torch.Tensor
    samples: list[Sample]


class Steady:
    """What is known of one optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.reference = weakref.ref(optimizer)
        self.rates: list[Rate] = []
        self.moves: Moves | None = None
        self.warming: Warming | None = None
        self.is_decided = False
        self.has_judged_moves = self.has_judged_rates = False  # there is a finding: it is made once
        self._graded = 0  # parameters that had a gradient at the look before
        self._copied_at = 0
        self._samples: list[Sample] = []
        self._copies = 0
        self._pending: _Pending | None = None

    def look(self, step: int) -> bool:
        """Look at an optimizer that has just stepped; whether what is known of it now looks bad."""
        optimizer = self.reference()
        rates = rates_of(optimizer)
        if rates is None:
            return False
        self.note_rate(step, max(rates, default=0.0))
        if not self.is_decided and step >= FIRST_LOOKS[1]:
            with torch.no_grad():
                self._look_at_weights(optimizer, rates, step)
            if self.moves is not None and self.moves.are_doubtful:
                return True
        built_with = optimizer.defaults.get("lr") if optimizer is not None else None
        is_small = isinstance(built_with, float) and bool(rates) and max(rates) < _MAX_SMALL_SHARE * built_with
        return is_small or self.nothing_since() is not None or self.negative_since() is not None

    def lost_gradients(self) -> bool:
        """Whether fewer parameters have a gradient than at the look before, although none was frozen."""
        optimizer = self.reference()
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]] if optimizer else []
        graded = sum(tensor.grad is not None for tensor in tensors)
        before, self._graded = self._graded, graded
        trained = sum(tensor.requires_grad for tensor in tensors)
        return bool(graded < before <= trained)

    def nothing_since(self, share: float = MAX_DEAD_SHARE) -> Rate | None:
        """The first look since which the rate has been a small share of the largest at most; None if it is not."""
        bound = share * max((each.rate for each in self.rates), default=0.0)
        return self._since(lambda rate: abs(rate) <= bound) if bound > 0 else None

    def negative_since(self) -> Rate | None:
        """The first look since which the rate has been negative; None if it is not, or was never anything else."""
        return self._since(lambda rate: rate < 0) if max((each.rate for each in self.rates), default=0.0) > 0 else None

    def _since(self, is_bad: Callable[[float], bool]) -> Rate | None:
        bad = list(itertools.takewhile(lambda each: is_bad(each.rate), reversed(self.rates)))
        return bad[-1] if bad else None

    def note_rate(self, step: int, rate: float) -> None:
        if len(self.rates) < _MAX_RATES:
            self.rates.append(Rate(step, rate))

    def _look_at_weights(self, optimizer: Any, rates: list[float], step: int) -> None:
        if self._pending is not None and not bool(self._pending.host.isnan().any()):
            self._decide(self._pending)
        self._pending = None
        if self.is_decided:
            self._samples = []
            return
        is_rising = bool(self._samples) and max(rates, default=0.0) > max(sample.rate for sample in self._samples)
        if not self._samples or is_rising:
            self._copies += 1
            self._samples = list(samples_of(optimizer, rates)) if self._copies <= _MAX_COPIES else []
            self._copied_at = step
            self.is_decided = not self._samples
        elif step - self._copied_at >= _MIN_UPDATES:
            self._measure(step)

    def _measure(self, step: int) -> None:
        counted = [(sample, counts) for sample in self._samples if (counts := counts_of(sample)) is not None]
        if not counted:
            self.is_decided = True
            return
        samples = [sample for sample, _ in counted]
        values = torch.stack([counts for _, counts in counted]).reshape(-1)
        device = async_devices.devices.get(values.device.type)
        if device is None:
            self._decide(_Pending(step, values, samples))
        elif device.may_work():
            host, event = device.places(values.numel(), torch.float32)
            host.fill_(float("nan"))
            device.arrange_many(host, event, values)
            self._pending = _Pending(step, host, samples)

    def _decide(self, known: _Pending) -> None:
        self.is_decided = True
        self._samples = []
        rows = known.host.reshape(-1, _COUNTS).tolist()
        layers = []
        for sample, (graded, moved, largest, before, change) in zip(known.samples, rows, strict=True):
            tensor = sample.reference()
            if tensor is not None:
                layers.append(
                    LayerMoves(
                        sample.reference,
                        tensor.dtype,
                        tensor.dim() > 1,
                        sample.rate,
                        int(graded),
                        int(moved),
                        largest,
                        before,
                        change,
                    )
                )
        self.moves = Moves(self._copied_at, known.step, layers)


def rates_of(optimizer: Any) -> list[float] | None:
    """The rates of all groups; None where one is on a device."""
    found: list[float] = []
    for group in optimizer.param_groups if optimizer is not None else ():
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            if not rate.is_cpu:
                return None
            rate = rate.item()
        if not isinstance(rate, float | int):
            return None
        found.append(float(rate))
    return found
