"""Whether somebody writes to the weights after each update, so that the update is undone.

Each cycle from one update to the next begins with a look at a few values. The first cycle in which nobody writes to
them ends the search, which is the first cycle of nearly every run. After many cycles in a row with a write, two cycles
are looked at with all weights: only these tell an update that is undone from weights that are clamped or masked.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch

from torchmedic.observe.step.tensors import parameters_of
from torchmedic.source.spots import NOWHERE, Place

_SAMPLE = 8  # values of a weight
_MIN_CYCLES = 14  # in a row with a write, before all weights are looked at
_MIN_FULL = 2  # cycles that are looked at with all weights
_MAX_ELEMENTS = 1 << 24  # of all weights
_MIN_MATRIX = 64  # values that show whether two matrices are alike
_MAX_ALIKE = 0.25  # correlation of a weight with a weight that does not depend on it
_MAX_KEPT = 0.002  # of an update that is undone; more may be a small step on purpose, as in meta-learning
USUAL_DECAY = 0.1  # with that, a large shrinkage is the fault of the learning rate
_MAX_KEPT_VALUE = 0.1  # of the largest change of a single value


def decay_of(group: dict[str, Any]) -> float:
    decay = group.get("weight_decay", 0.0)
    return float(decay) if isinstance(decay, float | int) else 0.0


class Undone(NamedTuple):
    """What happens between two updates: the lines of the events before and after the write, cycles, share kept."""

    after: Place
    before: Place
    cycles: int
    kept: float  # of each update; 0 for weights that are set to new values
    is_new: bool  # the weights have no likeness with what they were


class Overwrites:
    """Finds out whether the updates of one optimizer are undone. The ledger reports the events of the loop."""

    def __init__(self) -> None:
        self.found: Undone | None = None
        self.is_over = False
        self.first_sizes: torch.Tensor | None = None  # of the matrices, where weight decay is above what is usual
        self._cycles = 0
        self._full: list[tuple[float, bool]] = []
        self._tensors: list[weakref.ref[torch.Tensor]] = []  # with a gradient in the first update
        self._sample: tuple[Any, ...] = ()  # of the weights at the last look
        self._after: tuple[Any, ...] = ()  # the same, after the last update
        self._weights: list[torch.Tensor] = []  # before the last update
        self._updated: list[torch.Tensor] = []  # after the last update
        self._last = NOWHERE  # the event before the present one
        self._between = (NOWHERE, NOWHERE)
        self._is_used = False  # a model was called with the weights of an update before they were written to

    def event(self, place: Place, *, is_forward: bool = False) -> None:
        """Note an event of the loop, and whether somebody wrote to the weights before it."""
        if self._updated:
            now = self._look()
            if now != self._sample:
                self._between = (self._last, place)
                self._sample = now
            elif is_forward and self._sample == self._after:
                self._is_used = True
        self._last = place if place.line else self._last

    def step_begins(self, optimizer: Any) -> None:
        if not self._tensors:
            graded = (one for one in parameters_of(optimizer) if one.grad is not None and one.numel())
            self._tensors = list(map(weakref.ref, graded))
            if any(decay_of(group) > USUAL_DECAY for group in optimizer.param_groups):
                self.first_sizes = self.sizes()
        if self._updated:
            self._compare()
        elif self._sample and self._sample == self._look():
            self.is_over = True
        self.is_over = self.is_over or not self._look()
        self._cycles += bool(self._sample)
        if not self.is_over and self._cycles >= _MIN_CYCLES:
            self._weights = self._copies()
            self.is_over = not self._weights

    def step_ended(self) -> None:
        self._sample = self._after = self._look()
        self._updated = self._copies() if self._weights else []

    @torch.no_grad()
    def sizes(self) -> torch.Tensor | None:
        """The norms of the matrices, on their device; None where a tensor is not of the usual kind."""
        matrices = [tensor for tensor in self._living() if tensor.dim() > 1]
        if not matrices or not all(map(_is_plain, matrices)):
            return None
        if matrices[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        norms = [tensor.norm().to(matrices[0].device, torch.float32) for tensor in matrices]
        return torch.stack(norms)

    def _living(self) -> list[torch.Tensor]:
        return [tensor for reference in self._tensors if (tensor := reference()) is not None]

    def _look(self) -> tuple[Any, ...]:
        """Some values of the first and of the last weight; nothing where a device would have to be waited for."""
        tensors = self._living()
        found: list[Any] = []
        for tensor in tensors[:1] + tensors[-1:]:
            if not _is_plain(tensor) or not tensor.is_cpu or not tensor.dim():
                return ()
            found.append(tuple(tensor.detach()[(0,) * (tensor.dim() - 1)][:_SAMPLE].tolist()))
        return tuple(found)

    def _copies(self) -> list[torch.Tensor]:
        tensors = self._living()
        if sum(tensor.numel() for tensor in tensors) > _MAX_ELEMENTS or not all(map(_is_plain, tensors)):
            return []
        return [tensor.detach().clone() for tensor in tensors]

    def _compare(self) -> None:
        """Compare all weights before and after the last update with their values before this update."""
        cycle = _undone(self._weights, self._updated, self._living())
        self._weights, self._updated = [], []
        if cycle is None or (cycle[1] and self._is_used):
            self.is_over = True  # a new network for each task, which is judged after one update
            return
        self._full.append(cycle)
        if len(self._full) >= _MIN_FULL:
            self.is_over = True
            kept = max(share for share, _ in self._full)
            self.found = Undone(*self._between, self._cycles, kept, all(is_new for _, is_new in self._full))


def _is_plain(tensor: torch.Tensor) -> bool:
    is_usual = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_usual and tensor.is_floating_point() and not (tensor.is_meta or tensor.is_inference())


@torch.no_grad()
def _undone(
    before: list[torch.Tensor], updated: list[torch.Tensor], now: list[torch.Tensor]
) -> tuple[float, bool] | None:
    """The share of the update that matrices keep, and whether any is new; None where one keeps more.

    A matrix that nobody has written to has no part in this: the rest may be those of one of several networks. But it
    learns, also where other matrices are new ones for each task on purpose.
    """
    if not len(before) == len(updated) == len(now):
        return None
    shares, is_new, learns = [], False, False
    for old, new, present in zip(before, updated, now, strict=True):
        update = float((new - old).norm()) if present.dim() > 1 else 0.0
        if not update > 0 or (new.shape == present.shape and torch.equal(new, present)):
            learns = learns or update > 0
            continue
        share = float((present - old).norm()) / update if old.shape == present.shape else math.inf
        if share == 0:
            return None  # set back on purpose: for the next client of federated training, the next sample to adapt to
        if share <= _MAX_KEPT:
            if float((present - old).abs().amax()) > _MAX_KEPT_VALUE * float((new - old).abs().amax()):
                return None  # a few rows are trained, and all others are kept as they were
            shares.append(share)
        elif present.numel() < _MIN_MATRIX:
            continue  # too few values to tell chance from likeness
        elif old.shape == present.shape and _likeness(new, present) <= _MAX_ALIKE:
            is_new = True
        else:
            return None
    is_undone = bool(shares) or is_new
    return (max(shares, default=0.0), is_new) if is_undone and not (is_new and learns) else None


def _likeness(first: torch.Tensor, second: torch.Tensor) -> float:
    """The correlation of two tensors; 1 where it cannot be told."""
    one, two = (each.detach().reshape(-1).float() - each.mean().float() for each in (first, second))
    found = float((one * two).sum() / (one.norm() * two.norm()))
    return 1.0 if math.isnan(found) else abs(found)
