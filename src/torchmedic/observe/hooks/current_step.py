"""The step that is under way, as the hooks know it, and the watches that they feed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec

from torchmedic.contained import contained, report_fault
from torchmedic.observe.checkup.watch import Checkup
from torchmedic.observe.device.async_devices import is_device_error
from torchmedic.observe.heap.growth_watch import LeakWatch
from torchmedic.observe.hooks.short_steps import ShortSteps
from torchmedic.observe.loop.ledger import Habits
from torchmedic.observe.numbers.finite_watch import FiniteWatch
from torchmedic.observe.numbers.training_curves import TrainingCurves
from torchmedic.observe.numbers.weight_copies import Rewind
from torchmedic.observe.step.batches import Batches
from torchmedic.observe.step.clock import Clock
from torchmedic.observe.step.step_notes import StepNotes
from torchmedic.source.user_code import user_frame

P = ParamSpec("P")

_MIN_ALIKE_STEPS = 8  # in a row, to know how a loop is built


class Step:
    """The state that the hooks of data, forward, backward, optimizer and scaler share."""

    def __init__(
        self,
        clock: Clock,
        batches: Batches,
        notes: StepNotes,
        finite: FiniteWatch,
        rewind: Rewind,
        habits: Habits,
    ) -> None:
        self.clock = clock
        self.batches = batches
        self.notes = notes
        self.finite = finite
        self.rewind = rewind
        self.habits = habits
        self.short_steps = ShortSteps(clock, batches, notes, finite)
        self.curves = TrainingCurves()
        self.checkup: Checkup | None = None
        self.leaks: LeakWatch | None = None
        self.paused = False  # while a replay runs, which is not training
        self.noting = False
        self.is_sampled_out = False  # this step is not noted in full
        self.fast_path = False  # nor was the one before, all was well in it, and nobody waits for anything
        self.backward_depth = 0
        self.stepping: Any = None  # the optimizer whose step is under way
        self._is_opened = False  # since the last update something was seen to begin the step
        self._opened_by_others = 0  # steps in a row that were

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
