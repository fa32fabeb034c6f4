"""Which steps are watched in full: all of them, unless they are many and very short.

A step of a small model takes a millisecond or two, most of it spent on launching kernels; to note everything that a
replay might want would be felt there. After some hundred such steps only one in 64 is noted in full. In the others the
batch and the loss are kept, and on the CPU the gradients are looked at as ever; only the random state and the variables
that a step starts from are not known, so that nobody puts back stale ones. On a device that is read late, the losses of
these steps are read together: what is bad is noticed some dozen steps later, and traced to its own step all the same.
"""

from __future__ import annotations

from typing import Any

from torchmedic.observe.failures import exceptions
from torchmedic.observe.numbers.finite_watch import FiniteWatch
from torchmedic.observe.step.batches import Batches
from torchmedic.observe.step.clock import Clock
from torchmedic.observe.step.step_notes import StepNotes

_MAX_SHORT_SECONDS = 0.005  # of a step that counts as short
_MAX_STILL_SHORT_SECONDS = 0.01  # in a run that is known to have short steps: a busy machine changes nothing about it
_MIN_STEPS = 300  # before a run is known to have short steps
_FULL_EVERY = 64  # steps, of which one is noted in full


class ShortSteps:
    """Decides which steps are sampled out, and does what is left to do in them."""

    def __init__(self, clock: Clock, batches: Batches, notes: StepNotes, finite: FiniteWatch) -> None:
        self._clock = clock
        self._batches = batches
        self._notes = notes
        self._finite = finite
        self._most = _MAX_SHORT_SECONDS

    def applies(self) -> bool:
        """Whether the coming step is sampled out."""
        clock = self._clock
        if clock.step <= _MIN_STEPS or self._finite.is_rising:
            return False
        if clock.step % _FULL_EVERY == 0:
            self._most = _MAX_STILL_SHORT_SECONDS if clock.usual_step < self._most else _MAX_SHORT_SECONDS
            return False
        return clock.usual_step < self._most

    def begin(self) -> None:
        self._notes.forget()

    def data_requested(self, iterator: Any) -> None:
        self._clock.data_requested()
        self._batches.requested(iterator)

    def data_arrived(self, iterator: Any, batch: Any) -> None:
        """A batch has come. Where losses are read late, it is needed after the step is over."""
        self._batches.taken(iterator)
        self._batches.arrived(batch, direct=self._batches.is_direct, is_kept=self._finite.reads_late)

    def backward_begins(self, roots: Any) -> None:
        exceptions.training_goes_on()
        if self._finite.on:
            self._finite.sampled_out_backward_begins(roots, self._clock.step)
