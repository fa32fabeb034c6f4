"""Stretches of short steps in which nothing is suspected: each hook then does the least, in one or two frames.

The code of torchmedic is cold at every step of a small model, because the kernels of the step have used the caches. So
the number of functions and objects that are touched counts, not the work that they do. In a stretch the hooks look at
the loss and at one gradient, and count the step. What else a step has to tell is told for all steps of a stretch
together, when it ends. A stretch ends before a step that somebody waits for, and at once where anything is unusual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchmedic import contained as containment
from torchmedic.contained import contained
from torchmedic.observe.numbers.finite_checks import Witness

if TYPE_CHECKING:
    from torchmedic.observe.hooks.current_step import Step

_REST_AFTER_NOTHING = 32  # steps after a stretch without a single fast step, before another one is tried
_NO_WITNESS = Witness(0, False)


class FastSteps:
    """The stretch under way, if there is one. The hooks read `on`; any thread may set it to False."""

    __slots__ = (
        "_backwards",
        "_first",
        "_not_before",
        "_step",
        "has_begun",
        "is_late",
        "on",
        "optimizer",
        "until",
        "witness",
    )

    def __init__(self, step: Step) -> None:
        self._step = step
        self.on = False
        self.has_begun = False  # an update, since a scaler was asked for one
        self.is_late = False  # losses are read late
        self.until = 0  # the first step that is not fast
        self.optimizer = 0  # the identity of the only optimizer
        self.witness = _NO_WITNESS  # of that optimizer
        self._first: int | None = None  # the first step that has not been accounted for
        self._backwards = 0  # calls of backward before it
        self._not_before = 0  # the step from which on another stretch may begin

    def begin(self, optimizer: Any) -> None:
        """A step is over, and the next one is not noted in full: begin a stretch."""
        step = self._step
        clock, finite, leaks, ranks = step.clock, step.finite, step.leaks, step.ranks
        witness = finite.witness(optimizer)
        if (
            clock.step < self._not_before
            or clock.optimizer_count != 1
            or witness is None
            or not finite.is_calm
            or step.paused
            or not containment.is_sound()
            or (ranks is not None and (ranks.begins or ranks.wants_batches))
        ):
            return
        until = min(step.short_steps.next_full, step.habits.standstill.due)
        if leaks is not None:
            until = min(until, leaks.due)
        if ranks is not None:
            until = min(until, clock.step + ranks.due - ranks.updates)
        self.until, self.optimizer, self.witness = until - 1, id(optimizer), witness
        if self.until <= clock.step:
            return  # the next step is the one that somebody waits for
        self._first, self._backwards = clock.step, finite.losses.backwards
        self.is_late = finite.losses.late.place is not None
        finite.begin_fast_steps()
        self.on = True

    def leave(self) -> None:
        """End the stretch, and account for its steps."""
        self.on = False
        first, self._first = self._first, None
        if first is None:
            return
        count = self._step.clock.step - first
        self._not_before = self._step.clock.step + (0 if count else _REST_AFTER_NOTHING)
        self._account(first, count)

    @contained("observe.fast_steps", computes=False)
    def _account(self, first: int, count: int) -> None:
        """Tell of some steps what the hooks tell of every other step one by one."""
        step = self._step
        clock, finite = step.clock, step.finite
        finite.losses.end_stretch()
        if not count:
            return
        clock.steps_passed(count)
        finite.steps_passed(count)
        if step.ranks is not None:
            step.ranks.updates += count
        if clock.step > step.curves.due and not finite.losses.late.are_usual:
            under_way = clock.micro_step + bool(step.backward_depth)  # calls of backward in the step that is not over
            losses = finite.losses.last_of_steps(count, self._backwards, under_way)
            step.curves.passed(first, losses, finite.last_key)
