"""Which lines of a loop make the host wait for the device, and what that costs; measured in a few steps, once.

A wait costs nothing by itself: the device works meanwhile. It costs what the device then stands still, because nothing
more was prepared for it. So two times are taken from the end of a wait to the next one, both by the device itself:
as it is, and with a short delay put before the work, so that the host is ahead as it would be without the wait. The
difference is the time for which the device had nothing to do, and the smaller of it and of the wait is what the line
costs. No wait is added or left out. The delays, some milliseconds in all, are the only thing that the loop can feel.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

from torchmedic.observe.device.device_queue import Queue
from torchmedic.observe.device.wait_calls import WaitCalls, place_of
from torchmedic.source.spots import Place

_FIRST_STEP = 68  # the ledger of the loop has gone to sleep by then
_CENSUS_STEPS = 2  # show whether there is anything to measure
_PLAIN_STEPS = 8  # without delays
_DELAYED_STEPS = 5
_DELAYS_PER_LINE = 4
_MAX_DELAY_SECONDS = 0.05
_MAX_MARKS = 64  # calls that are told apart between two waits
_OWN_SECONDS = 60e-6  # seconds that torchmedic itself takes in a step
_OWN_SECONDS_PER_CALL = 2e-5  # seconds that torchmedic itself takes in a watched call
_MAX_TRIES = 3


class Waited(NamedTuple):
    """A line that waits in every step: which share of a step it costs, and what was measured."""

    place: Place
    name: str  # of the function that waited
    uploads: bool  # it brings data to the device
    share: float
    waits: float  # seconds in one step that the host stood still
    idle: float  # and that the device then had nothing to do
    step: float


class _Segment:
    """The time from the end of one wait to the next call that waits or may wait."""

    def __init__(self, site: int, delayed: bool, began: Any, now: float) -> None:
        self.site = site
        self.delayed = delayed
        self.began = began
        self.started = now
        self.marks: dict[int, Any] = {}  # by the site of a call
        self.closer: int | None = None


class _Line:
    def __init__(self, place: Place, name: str, uploads: bool) -> None:
        self.place = place
        self.name = name
        self.uploads = uploads
        self.waits: list[float] = []
        self.lengths: list[float] = []  # of what follows, for the host
        self.plain: list[_Segment] = []
        self.delayed: list[_Segment] = []


class DeviceWaits:
    """Fed by the check-up, step by step; patches the calls that wait only while it measures."""

    def __init__(
        self,
        queue: Queue,
        steps: Callable[[], int],
        is_quiet: Callable[[], bool],
        done: Callable[[list[Waited]], object],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.queue = queue
        self._step_now = steps
        self._is_quiet = is_quiet
        self._done = done
        self._clock = clock
        self._seen = 0  # the step that was looked at last
        self.calls = WaitCalls(self)
        self.over = False
        self._stage = "before"
        self._left = 0  # steps of this stage
        self._tries = 0
        self._thread = 0
        self._entered: tuple[int, float] | None = None
        self._open: _Segment | None = None
        self._lines: dict[int, _Line] = {}
        self._steps: list[float] = []
        self._last: Any = None

    @property
    def armed(self) -> bool:
        return self.calls.armed

    def stop(self) -> None:
        """Stop measuring for good."""
        self.over = True
        self._disarm()

    def _disarm(self) -> None:
        self.calls.disarm()
        self._open = self._entered = None

    def step_ended(self) -> None:
        """An optimizer has stepped; where there are several, a step is over when all have."""
        steps = self._step_now()
        if self.over or steps == self._seen:
            return
        # Of many short steps only some are watched in full, and these are no place to measure.
        quiet = self._is_quiet() and steps == self._seen + 1
        self._seen = steps
        if self._stage == "before" and (steps < _FIRST_STEP or not quiet):
            return
        if self._stage == "reading":
            if self.queue.is_reached(self._last):
                self._read()
            return
        if not quiet or not self.queue.is_usable():
            self._give_up()
            return
        if self._stage == "before":
            self._thread = threading.get_ident()
            self._lines.clear()
            self._steps.clear()
            self.calls.arm()
            self._stage, self._left = "census", _CENSUS_STEPS
            return
        if self._stage == "plain":
            self._steps.append(self._clock())
        self._left -= 1
        if self._left <= 0:
            self._next_stage()

    def _give_up(self) -> None:
        """Something else has come up: begin anew later, but not for ever."""
        self._tries += 1
        self._stage = "before"
        self._disarm()
        if self._tries >= _MAX_TRIES:
            self.over = True

    def _next_stage(self) -> None:
        if self._stage == "census":
            if not any(len(line.waits) >= _CENSUS_STEPS - 1 and line.place.line for line in self._lines.values()):
                self.stop()
                return
            self._lines.clear()
            self._open = None
            self._stage, self._left = "plain", _PLAIN_STEPS
            self._steps.append(self._clock())
        elif self._stage == "plain":
            self._stage, self._left = "delayed", _DELAYED_STEPS
        else:
            self._disarm()
            self._last = self.queue.mark()
            self._stage = "reading"

    # Calls

    def begins(self, site: int, frame: FrameType, name: str, *, uploads: bool) -> bool:
        """A call begins that may have to wait; whether its end is of interest."""
        if self._entered is not None or threading.get_ident() != self._thread or not self.queue.is_usable():
            return False
        segment, busy = self._open, self.queue.is_busy()
        if segment is not None and site not in segment.marks and len(segment.marks) < _MAX_MARKS:
            segment.marks[site] = self.queue.mark()
        if not busy:
            return False
        self._entered = (site, self._clock())
        if site not in self._lines:
            self._lines[site] = _Line(place_of(frame), name, uploads)
        return True

    def ended(self) -> None:
        """The call is over: if the device has nothing left to do, the host has waited for it."""
        entered, self._entered = self._entered, None
        if entered is None or self.queue.is_busy():
            return
        site, began = entered
        now = self._clock()
        line = self._lines[site]
        segment = self._open
        if segment is not None and site in segment.marks:
            segment.closer = site
            owner = self._lines[segment.site]
            owner.lengths.append(began - segment.started)
            (owner.delayed if segment.delayed else owner.plain).append(segment)
        self._open = None
        delayed = self._stage == "delayed"
        if not delayed:
            line.waits.append(now - began)
        elif len(line.delayed) >= _DELAYS_PER_LINE or not line.lengths:
            return
        else:
            self.queue.delay(min(_MAX_DELAY_SECONDS, 1.3 * _median(line.lengths) + 2e-4))
        self._open = _Segment(site, delayed, self.queue.mark(), self._clock())

    # Results

    def _read(self) -> None:
        self.over = True
        lengths = [later - earlier for earlier, later in zip(self._steps, self._steps[1:], strict=False)]
        if len(lengths) < _PLAIN_STEPS - 1:
            return
        step = _median(lengths)
        found: list[Waited] = []
        for line in self._lines.values():
            idle = self._idle_after(line)
            if idle is None or len(line.waits) < len(lengths) - 1 or step <= 0 or not line.place.line:
                continue
            waits, times = _median(line.waits), len(line.waits) / len(lengths)
            share = (min(waits, idle) * times - _OWN_SECONDS) / step
            found.append(Waited(line.place, line.name, line.uploads, share, waits * times, idle * times, step))
        self._lines.clear()
        if found:
            self._done(found)

    def _idle_after(self, line: _Line) -> float | None:
        """How long the device stood still after the wait, up to where the host would wait next without this one."""
        closers = Counter(segment.closer for segment in line.delayed)
        if not closers:
            return None
        closer, count = closers.most_common(1)[0]
        if closer is None or count < _DELAYS_PER_LINE - 1:
            return None
        ahead = sorted(self._length(segment, closer) for segment in line.delayed if segment.closer == closer)
        as_it_is = sorted(self._length(segment, closer) for segment in line.plain if closer in segment.marks)
        if len(as_it_is) < _PLAIN_STEPS - 3:
            return None
        # The longest with the host ahead against a short one without: what is left is no chance.
        return max(0.0, as_it_is[len(as_it_is) // 4] - ahead[-1] - _OWN_SECONDS_PER_CALL)

    def _length(self, segment: _Segment, closer: int) -> float:
        return self.queue.between(segment.began, segment.marks[closer])


def _median(values: Sequence[float]) -> float:
    """The middle value. The module `statistics` takes 7 ms to import."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
