"""The step clock: which step, which phase, which line of the user's code.

A *step* is one update of the weights as the user's loop means it. It is over when every living optimizer has stepped
or, where some never do, when new data is fetched or the same optimizer steps again. So the two optimizers of a GAN
share a step, and an accumulation cycle is one step of several *micro-steps* (backward calls). Where no optimizer was
ever built, the loop updates its weights by hand, and a step is over when the same line computes gradients again.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from time import monotonic
from types import CodeType, FrameType
from typing import Any

from torchmedic.observe.memory.usage import MemoryGauge
from torchmedic.observe.step.blackbox import BlackBox
from torchmedic.records import PHASES, Phase
from torchmedic.source.lookup.optimizers import Construction
from torchmedic.source.objects.weak_table import WeakTable
from torchmedic.source.user_code import is_user_file, verdicts

OTHER, DATA, FORWARD, BACKWARD, OPTIMIZER = range(len(PHASES))


class Clock:
    """Counts steps and phases, one call of a hook per event; written through to the black box."""

    def __init__(self) -> None:
        self.box: BlackBox | None = None
        # A child of `multiprocessing` is given a box only once it is seen to train; most are data workers.
        self.open_box: Callable[[], object] | None = None
        self.step = 0
        self._first_step = 0
        self.micro_step = 0
        self.phase = OTHER
        self.phase_started = monotonic()
        self.file = ""
        self.line = 0
        self.called: tuple[str, int] = ("", 0)  # the line of the last call of a root module that was noted
        self.optimizer_count = 0  # of those that live
        self._optimizers: dict[int, weakref.ref[Any]] = {}  # a WeakSet is asked too slowly for every event
        self.constructions: WeakTable[Construction] = WeakTable()  # of optimizers
        self._stepped: set[int] = set()  # identities
        self._had_optimizers = False
        self._by_hand: set[tuple[str, int]] = set()  # lines that have computed gradients in this step
        self._lines: dict[tuple[int, int], tuple[CodeType, int]] = {}
        self.gauge = MemoryGauge()
        self.usual_step = 0.0  # seconds, a running average
        self._step_closed: float | None = None

    def count_from(self, step: int) -> None:
        """Count on after the steps of another clock."""
        self.step = self._first_step = step

    def copied(self) -> Clock:
        """A clock that shows the same, and writes to no black box."""
        clock = copy.copy(self)
        clock.box = clock.open_box = None
        clock.gauge = MemoryGauge()
        return clock

    @property
    def phase_name(self) -> Phase:
        return PHASES[self.phase]

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that live, in the order in which they were built."""
        return [optimizer for reference in self._optimizers.values() if (optimizer := reference()) is not None]

    def enter(self, phase: int, frame: FrameType | None = None) -> FrameType | None:
        """Begin a phase at the user's current line; returns the user's frame.

        Called several times a step, so it does by itself what `user_frame` does.
        """
        self.phase = phase
        self.phase_started = monotonic()
        if frame is None:
            frame = sys._getframe(1)
        known = verdicts.get
        while frame is not None:
            filename = frame.f_code.co_filename
            verdict = known(filename)
            if is_user_file(filename) if verdict is None else verdict:
                self.file = filename
                code = frame.f_code
                key = (id(code), frame.f_lasti)
                place = self._lines.get(key)
                if place is None:
                    place = self._remember(key, code, frame.f_lineno)
                self.line = place[1]
                break
            frame = frame.f_back
        if phase == FORWARD:
            self.called = (self.file, self.line)
        if self.box is None and phase == BACKWARD and self.open_box is not None:
            self.open_box()
        self._write()
        return frame

    def _remember(self, key: tuple[int, int], code: CodeType, line: int) -> tuple[CodeType, int]:
        """Cache the line of a place, as `f_lineno` is slow. The code is kept alive, so its identity stays unique."""
        if len(self._lines) > 4096:
            self._lines.clear()
        place = self._lines[key] = (code, line)
        return place

    def leave(self) -> None:
        """End a phase at the line at which it began."""
        self.phase = OTHER
        self.phase_started = monotonic()
        self._write()

    def _write(self) -> None:
        box = self.box
        if box is None:
            return
        gauge = self.gauge
        if self.phase_started >= gauge.due:
            gauge.read(self.phase_started)
        updates = self.updates if self._stepped or self._by_hand else self.step
        box.write(self.phase, self.step, self.micro_step, updates, self.file, self.line, gauge.rss, gauge.device)

    def flush(self) -> None:
        """Write the present state to the black box; not every step does."""
        self._write()

    def data_requested(self) -> None:
        if self._stepped:
            self._close_step()

    def backward_done(self) -> None:
        if not self._had_optimizers:
            self._count_by_hand()
        self.micro_step += 1

    def _count_by_hand(self) -> None:
        """Gradients were computed, and no optimizer was ever built: the loop updates the weights itself."""
        place = (self.file, self.line)
        if place in self._by_hand:
            self._by_hand.clear()
            self._next_step()
        self._by_hand.add(place)

    @property
    def is_by_hand(self) -> bool:
        """Whether the loop updates its weights without an optimizer."""
        return bool(self._by_hand) and self.step > self._first_step

    def optimizer_built(self, optimizer: Any, by: Construction | None = None) -> None:
        if by is not None:
            self.constructions[optimizer] = by
        key = id(optimizer)
        living = self._optimizers
        if not self._had_optimizers:
            self._had_optimizers = True
            self._by_hand.clear()
            self.step, self.micro_step = self._first_step, 0  # what was computed so far was no training

        def gone(reference: Any) -> None:
            if living.get(key) is reference:
                del living[key]
                self.optimizer_count = len(living)

        living[key] = weakref.ref(optimizer, gone)
        self.optimizer_count = len(living)

    def optimizer_stepped(self, optimizer: Any) -> None:
        key = id(optimizer)
        if self.optimizer_count == 1 and not self._stepped and key in self._optimizers:
            self._next_step()  # as nearly always
            return
        if key in self._stepped:
            self._close_step()
        self._stepped.add(key)
        if key not in self._optimizers:
            self.optimizer_built(optimizer)
        if len(self._stepped) >= self.optimizer_count:
            self._close_step()

    @property
    def updates(self) -> int:
        """Steps in which some weights have been updated, the one in progress included."""
        return self.step + 1 if self._stepped or self.is_by_hand else self.step

    def _close_step(self) -> None:
        if self._stepped:
            self._stepped.clear()
            self._next_step()

    def _next_step(self) -> None:
        self.step += 1
        self.micro_step = 0
        now = monotonic()
        closed = self._step_closed
        self._step_closed = now
        if closed is not None:
            self._took(now - closed, 0.1)

    def steps_passed(self, count: int) -> None:
        """Some steps are over that were only counted; another one may be under way."""
        now = monotonic()
        closed = self._step_closed
        self._step_closed = None  # when the last of them ended is not known
        if closed is not None:
            self._took((now - closed) / (count + 0.5), 1 - 0.9**count)

    def _took(self, seconds: float, weight: float) -> None:
        usual = self.usual_step
        # One long step, with a validation in it say, says little of the others.
        excess = seconds - usual if seconds < 4 * usual else 3 * usual
        self.usual_step = usual + weight * excess if usual else seconds
