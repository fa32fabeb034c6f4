"""The step that is under way, as the hooks know it, the watches that they feed, and whether it is watched in full.

A step of a small model takes some milliseconds, most of it spent on launching kernels; to note everything that a
replay might want would be felt there. After some hundred such steps one is noted in full every 320 milliseconds, and
at least one in 192 (one in 64 on a device that is read late); on the CPU, of steps up to 60 milliseconds, one every
120 milliseconds. In the others the batch and the loss are kept, and on the CPU the gradients are looked at as ever.
Only the random state and the variables that a step starts from are not known, so that nobody puts back stale ones. On
a device that is read late, the losses of these steps are read together: what is bad is noticed some dozen steps later,
and traced to its own step all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import ceil
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec

from torchmedic.contained import contained, report_fault
from torchmedic.observe.checkup.watch import Checkup
from torchmedic.observe.device.async_devices import is_device_error
from torchmedic.observe.failures import exceptions
from torchmedic.observe.heap.growth_watch import LeakWatch
from torchmedic.observe.hooks.fast_steps import FastSteps
from torchmedic.observe.loop.event_writer import EventWriter
from torchmedic.observe.numbers.finite_watch import FiniteWatch
from torchmedic.observe.numbers.training_curves import TrainingCurves
from torchmedic.observe.numbers.weight_copies import Rewind
from torchmedic.observe.ranks.facts import FactsOfRank
from torchmedic.observe.step.batches import Batches
from torchmedic.observe.step.clock import Clock
from torchmedic.observe.step.step_notes import StepNotes
from torchmedic.observe.step.trainers import THREADS, is_started, others_train
from torchmedic.source.user_code import user_frame

if TYPE_CHECKING:
    from torchmedic.observe.ranks.recorder import Recorder

P = ParamSpec("P")

_MIN_ALIKE_STEPS = 8  # in a row, to know how a loop is built
_MAX_SHORT_SECONDS = 0.015  # of a step that counts as short: to note a step in full takes a hundredth of that
_MIN_LONG_SECONDS = 0.06  # of steps that are all noted in full: that takes half a percent, with cold caches
_MAX_STILL_SHORT_SECONDS = 0.025  # in a run that is known to have short steps: a busy machine changes nothing about it
_MIN_STEPS = 300  # before a run is known to have short steps
_SECONDS_BETWEEN_FULL_LONGER = 0.12  # between two steps that are noted in full, if steps are neither short nor long
_SECONDS_BETWEEN_FULL = 0.32  # between two short steps that are noted in full
_MAX_STEPS_BETWEEN_FULL = 192
_MAX_STEPS_BETWEEN_READS = 64  # on a device that is read late: so many losses are held


class Step:
    """The state that the hooks of data, forward, backward, optimizer and scaler share."""

    def __init__(
        self,
        clock: Clock,
        batches: Batches,
        notes: StepNotes,
        finite: FiniteWatch,
        rewind: Rewind,
        habits: EventWriter,
    ) -> None:
        self.clock = clock
        self.batches = batches
        self.notes = notes
        self.finite = finite
        self.rewind = rewind
        self.habits = habits
        self.short_steps = ShortSteps(clock, finite)
        self.curves = TrainingCurves()
        self.checkup: Checkup | None = None
        self.leaks: LeakWatch | None = None
        self.ranks: FactsOfRank | None = None  # in a job of several ranks
        self.collectives: Recorder | None = None
        self.paused = False  # what happens now is not watched: a replay, or training in two threads
        self.is_crowded = False  # two threads have trained at the same time
        self.thread = 0  # that trains
        self.noting = False
        self.is_sampled_out = False  # this step is not noted in full
        self.fast = FastSteps(self)
        habits.on_wake = self.fast.leave
        self.backward_depth = 0
        self.stepping: Any = None  # the optimizer whose step is under way
        self._is_opened = False  # since the last update something was seen to begin the step
        self._opened_by_others = 0  # steps in a row that were

    def trains_in(self, thread: int) -> None:
        """Backward is called in another thread than before.

        Nothing is watched any more once two threads train at the same time. Their steps cannot be told apart, and to
        look at a gradient while another thread computes it can kill the process.
        """
        if not is_started(thread):
            return
        THREADS.add(thread)
        self.thread = thread
        if others_train():
            self.is_crowded = self.paused = True
            self.fast.on = False

    # Two parts of many hooks, each with a switch of its own: to contain them call by call would cost more than they do.

    @contained("observe.notes")
    def trust_notes(self) -> None:
        self.noting = True

    @contained("observe.finite")
    def trust_numbers(self) -> None:
        self.finite.on = True

    def numbers_failed(self, error: Exception, frame: FrameType) -> None:
        self.finite.on = False
        if is_device_error(error):
            self.finite.device_failed(error, frame)
        else:
            report_fault("observe.finite", error)

    def check_up(self, react: Callable[P, None], *facts: P.args, **more: P.kwargs) -> None:
        """Tell the check-up of an event by one of its methods; a fault stops the check-up, and nothing else."""
        try:
            react(*facts, **more)
        except Exception as error:
            if self.checkup is not None:
                self.checkup.stop()
            if is_device_error(error):
                self.finite.device_failed(error, sys._getframe(2))
            else:
                report_fault("observe.checkup", error)

    def opens(self, user: FrameType | None) -> None:
        """Data has come or gradients were cleared: the step proper begins."""
        if not self._is_opened:
            self._is_opened = True
            self._opened_by_others += 1
        self.begins(user)

    def begins(self, user: FrameType | None) -> None:
        if self.noting:
            try:
                self.notes.step_begins(user)
            except Exception as error:
                self.noting = False
                report_fault("observe.notes", error)

    def goes_forward(self, user: FrameType | None) -> None:
        """A root module is called; where nothing has opened the step, it begins here at the latest."""
        if not self._is_opened:
            if self._opened_by_others >= _MIN_ALIKE_STEPS:
                self.begins(user)  # after all, nobody has opened this step
            self._opened_by_others = 0

    def is_over(self, frame: FrameType) -> None:
        """The weights are updated. Where a hook sees every step begin, notes taken now would never be used."""
        if self._opened_by_others < _MIN_ALIKE_STEPS:
            self.begins(user_frame(frame))
        else:
            self.notes.step_is_over()
        self._is_opened = False


class ShortSteps:
    """Decides which steps are sampled out, and does what is left to do in them."""

    def __init__(self, clock: Clock, finite: FiniteWatch) -> None:
        self._clock = clock
        self._finite = finite
        self._most = _MAX_SHORT_SECONDS
        self.next_full = 0  # the number of a step
        self.is_of_ranks = False  # a job of several ranks

    def applies(self) -> bool:
        """Whether the coming step is sampled out."""
        clock, losses = self._clock, self._finite.losses
        if clock.step >= self.next_full:
            usual = clock.usual_step
            is_short = usual < self._most
            self._most = _MAX_STILL_SHORT_SECONDS if is_short else _MAX_SHORT_SECONDS
            seconds = _SECONDS_BETWEEN_FULL if is_short else _SECONDS_BETWEEN_FULL_LONGER
            most = _MAX_STEPS_BETWEEN_READS if losses.late.are_usual else _MAX_STEPS_BETWEEN_FULL
            between = min(most, ceil(seconds / max(usual, 1e-6)))
            if self.is_of_ranks:
                # All ranks wait for the slowest: at the same steps, what they note in full is waited for once.
                between = 1 << (2 * min(between, most - 1) // 3).bit_length()  # the next power of two
                between -= clock.step % between
            self.next_full = clock.step + between
            return False
        # What is bad on a late device is noticed a step later: of a step that is sampled out, a big batch is gone then.
        limit = self._most if losses.late.are_usual else _MIN_LONG_SECONDS
        return clock.usual_step < limit and clock.step > _MIN_STEPS and not losses.alarm

    def backward_begins(self, roots: Any) -> None:
        exceptions.training_goes_on()
        if self._finite.on:
            self._finite.sampled_out_backward_begins(roots, self._clock.step)
