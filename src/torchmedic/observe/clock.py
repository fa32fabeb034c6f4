"""The step clock: which step, which phase, which line of the user's code.

A *step* is one update of the weights as the user's loop means it. It is over when every living optimizer has stepped
or, where some never do, when new data is fetched or the same optimizer steps again. So the two optimizers of a GAN
share a step, and an accumulation cycle is one step of several *micro-steps* (backward calls).
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from torchmedic.observe.blackbox import BlackBox
from torchmedic.observe.frames import user_frame
from torchmedic.observe.memory import MemoryGauge
from torchmedic.records import PHASES, Phase

OTHER, DATA, FORWARD, BACKWARD, OPTIMIZER = range(len(PHASES))


class Clock:
    """Fed by the hooks, one call per event; written through to the black box."""

    def __init__(self) -> None:
        self.box: BlackBox | None = None
        # A child of `multiprocessing` is given a box only once it is seen to train; most are data workers.
        self.open_box: Callable[[], None] | None = None
        self.step = 0
        self.micro_step = 0
        self.phase = OTHER
        self.phase_started = time.monotonic()
        self.file = ""
        self.line = 0
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: set[int] = set()  # identities; a WeakSet is asked too slowly for every event
        self._gauge = MemoryGauge()
        self.usual_step = 0.0  # seconds, a running average
        self._step_closed: float | None = None

    @property
    def phase_name(self) -> Phase:
        return PHASES[self.phase]

    def enter(self, phase: int, frame: FrameType | None = None) -> None:
        """Begin a phase at the user's current line."""
        self.phase = phase
        self.phase_started = time.monotonic()
        user = user_frame(frame if frame is not None else sys._getframe(1))
        if user is not None:
            self.file = user.f_code.co_filename
            self.line = user.f_lineno
        if self.box is None and phase == BACKWARD and self.open_box is not None:
            self.open_box()
        self._write()

    def leave(self) -> None:
        """End a phase at the line at which it began."""
        self.phase = OTHER
        self.phase_started = time.monotonic()
        self._write()

    def _write(self) -> None:
        if self.box is None:
            return
        gauge = self._gauge
        if self.phase_started >= gauge.due:
            gauge.read(self.phase_started)
        self.box.write(
            self.phase, self.step, self.micro_step, self.updates, self.file, self.line, gauge.rss, gauge.device
        )

    def data_requested(self) -> None:
        self._close_step()

    def backward_done(self) -> None:
        self.micro_step += 1

    def optimizer_built(self, optimizer: Any) -> None:
        self.optimizers.add(optimizer)

    def optimizer_stepped(self, optimizer: Any) -> None:
        if id(optimizer) in self._stepped:
            self._close_step()
        self._stepped.add(id(optimizer))
        self.optimizers.add(optimizer)
        if len(self._stepped) >= len(self.optimizers):
            self._close_step()

    @property
    def updates(self) -> int:
        """Steps in which some weights have been updated, the one in progress included."""
        return self.step + 1 if self._stepped else self.step

    def _close_step(self) -> None:
        if self._stepped:
            self._stepped.clear()
            self.step += 1
            self.micro_step = 0
            now = time.monotonic()
            if self._step_closed is not None:
                took = now - self._step_closed
                self.usual_step += 0.1 * (took - self.usual_step) if self.usual_step else took
            self._step_closed = now
