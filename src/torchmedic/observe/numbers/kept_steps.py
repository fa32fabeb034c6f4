"""The last backward calls, with all that a replay of each needs.

On a device that is read late, a gradient that is not finite is noticed when the loss after it is, and that is a step
later: the batch, the random state and the variables of the step that made it are gone from the frames by then. On any
device, a run that diverges is explained by replaying its last steps. So they are kept for some steps, host memory up to
a limit and device memory only where it is a small tensor.
"""

from __future__ import annotations

import inspect
import os
import resource
import sys
import weakref
from collections import deque
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from torchmedic.observe.numbers.kept_values import GONE, Kept, kept
from torchmedic.observe.step.batches import Batches, HostBatch
from torchmedic.observe.step.clock import Clock
from torchmedic.observe.step.items import items_of
from torchmedic.observe.step.step_notes import StepNotes, device_states, line_of
from torchmedic.source.user_code import outside_torch, user_frame
from torchmedic.source.user_variables import looks_at_locals

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_MAX_CALLS = 33  # two accumulations over 16 batches, and one more
_MAX_SAMPLED_OUT_CALLS = 80  # of which only the batch is known, that may be held at a time
_MAX_FRAMES = 60
_MAX_POINTS = 5
_MAX_POINTS_WITH_VALUES = 3  # that keep the variables of their frame
_MAX_BATCH_BYTES = 64 << 20  # of all batches that are kept
_SHARED_MEMORY_FACTOR = 4  # what lies in shared memory counts so many times
# So many bytes may be kept of each, wherever they lie.
_TINY_BATCH_BYTES = _MAX_BATCH_BYTES // (_SHARED_MEMORY_FACTOR * (_MAX_CALLS + _MAX_SAMPLED_OUT_CALLS))
_FILES_SHARE = 8  # of the files that a process may have open, batches of workers may keep one in so many open
_MAX_FILES = 512
_NOT_DATA = (ModuleType, FunctionType, type, torch.nn.Module, Optimizer, torch.nn.Parameter)


class Point(NamedTuple):
    """The position of a frame at a backward call, and what its variables held."""

    code: CodeType
    lasti: int
    forward_lasti: int | None
    values: dict[str, Any]  # as `kept` gives them


class UpdateEnd(NamedTuple):
    """An update of the weights that followed a backward call."""

    optimizer: weakref.ref[Any]
    rates: tuple[Any, ...]  # the learning rate of every group, then
    code: CodeType | None  # of the frame that called `step`; None where backward was called by a closure of `step`
    lasti: int
    momenta: tuple[dict[str, Any], ...]  # of every group, then: a cyclic schedule changes them too


class KeptBackward:
    """A backward call that is over, with the `Notes` of its step."""

    __slots__ = (
        *("step", "update", "loss", "points", "kept", "batch_bytes", "origin", "is_sampled_out", "ends", "by_hand"),
        *("is_repeated", "leaves", "files"),
        *("rng", "forward_rng", "device_marks", "grad_enabled", "autocast"),
        *("carried", "carried_frame", "sequence_number"),
    )

    def __init__(self, notes: StepNotes, batches: Batches, step: int, update: int) -> None:
        self.step = step
        self.update = update  # how many updates of any optimizer came before it
        self.loss: float | None = None  # once it has arrived
        self.is_sampled_out = False  # only the batch is known
        self.points: list[Point] = []  # innermost first
        self.by_hand = False  # there is no optimizer: statements of the loop update the weights
        self.is_repeated = False  # the optimizer has called its closure for this update before
        self.leaves: list[Kept] = []  # what it trains, where the loop binds new tensors in every step
        self.ends: tuple[UpdateEnd, ...] = ()  # the updates that used its gradients
        self.rng = notes.rng
        self.device_marks = notes.device_marks
        self.grad_enabled = notes.grad_enabled
        self.autocast = notes.autocast
        self.carried = notes.carried
        self.carried_frame = notes.carried_frame
        self.sequence_number = notes.sequence_number
        self.forward_rng = notes.forward_rng
        kept = batches.kept
        self.kept = kept if kept is not None and kept.on_host else None
        self.batch_bytes = self.kept.nbytes if self.kept is not None else 0
        if self.batch_bytes > _TINY_BATCH_BYTES and batches.is_shared:
            self.batch_bytes *= _SHARED_MEMORY_FACTOR
        self.files = batches.files if self.kept is not None else 0
        self.origin = batches.origin

    @property
    def batch(self) -> Any:
        """The batch, as the loader yielded it; None where it was not kept."""
        return self.kept.whole if self.kept is not None else None

    @property
    def device_rng(self) -> list[torch.Tensor]:
        return device_states(self.device_marks)

    @property
    def forward(self) -> dict[int, tuple[CodeType, int]]:
        """Empty: the frames of the earlier step are gone; `points` tells where they were."""
        return {}

    @property
    def host_batch(self) -> HostBatch:
        return HostBatch(self.batch, items_of(self.origin))


class KeptBackwards:
    """The last backward calls, oldest first: the bad one need not be the last but one, if its damage shows later."""

    def __init__(self, notes: StepNotes, batches: Batches, clock: Clock) -> None:
        self._notes = notes
        self._batches = batches
        self._clock = clock
        self._names: dict[tuple[int, int, int | None], tuple[CodeType, tuple[str, ...]]] = {}
        self._own_losses: dict[tuple[int, int], tuple[CodeType, bool]] = {}
        self._place: tuple[int, int, int, int] | None = None
        self._same: list[Point] = []
        self._thin: list[Point] = []
        self._max_files = 0  # not known yet: the script may set the limit
        self.calls: deque[KeptBackward] = deque(maxlen=_MAX_CALLS + _MAX_SAMPLED_OUT_CALLS)

    def present(self, update: int) -> KeptBackward:
        return KeptBackward(self._notes, self._batches, self._clock.step, update)

    def record(self, frame: FrameType, update: int) -> KeptBackward:
        calls = self.calls
        past = self.present(update)
        past.points = self._points(frame)
        while len(calls) >= _MAX_CALLS and (
            not calls[0].is_sampled_out or calls[0].update < update - _MAX_SAMPLED_OUT_CALLS
        ):
            calls.popleft()
        calls.append(past)
        if past.batch_bytes > _MAX_BATCH_BYTES // _MAX_CALLS:
            self._trim()
        if past.files:
            self._close_files(past.files)
        return past

    def record_sampled_out(self, step: int, update: int) -> KeptBackward:
        """Keep a call of a sampled-out step: its batch, and the place of the last call."""
        if self._batches.kept is None and self.calls:
            return self.calls[-1]  # there is nothing that could be kept
        past = KeptBackward(self._notes, self._batches, step, update)
        last = self.calls[-1].points if self.calls else []
        if last is not self._thin:  # what the variables held then is of no use
            self._thin = [point._replace(values={}) for point in last]
        past.points = self._thin
        past.is_sampled_out = True
        if past.batch_bytes > _MAX_BATCH_BYTES // _MAX_SAMPLED_OUT_CALLS:
            past.kept = None
        self.calls.append(past)
        if past.files:
            self._close_files(past.files)
        return past

    def _trim(self) -> None:
        """Drop the older batches where all together are too big."""
        total = 0
        for call in reversed(self.calls):
            total += call.batch_bytes
            if total > _MAX_BATCH_BYTES:
                call.kept = None

    def _close_files(self, files: int) -> None:
        """Drop the older batches where so many files for each would be too many: all but the last few are gone."""
        if not self._max_files:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._max_files = _MAX_FILES if limit < 0 else max(1, min(limit // _FILES_SHARE, _MAX_FILES))
        at = len(self.calls) - 1 - self._max_files // files
        while at >= 0 and self.calls[at].kept is not None:
            call = self.calls[at]
            call.kept, call.points = None, [point._replace(values={}) for point in call.points]
            at -= 1

    def _points(self, frame: FrameType) -> list[Point]:
        """The frames that both the forward pass and this call are below."""
        caller = outside_torch(frame)
        if caller is None:
            return []
        forward = self._notes.forward_points
        place = (id(caller), id(caller.f_code), caller.f_lasti, id(forward))
        if place == self._place:
            return self._same  # the same frames as last time, and no variable of theirs matters
        points: list[Point] = []
        at: FrameType | None = caller
        for _ in range(_MAX_FRAMES):
            if at is None or len(points) == _MAX_POINTS:
                break
            code, noted = at.f_code, forward.get(id(at))
            is_noted = noted is not None and noted[0] is code and not code.co_filename.startswith(_TORCH)
            # A frame that runs the same call in both passes and is the innermost is another one at the same address.
            if noted is not None and is_noted and (points or noted[1] != at.f_lasti):
                points.append(self._point(at, noted[1], len(points) < _MAX_POINTS_WITH_VALUES))
            at = at.f_back
        user = user_frame(caller)
        if not points:
            while user is not None and len(points) < _MAX_POINTS_WITH_VALUES:
                points.append(self._point(user, None, True))
                user = user_frame(user.f_back)
        elif caller is user and caller.f_code not in [each.code for each in points]:
            # The forward pass that was noted may be another one, from further outside: an agent acts, then learns.
            points[:0] = [self._point(caller, None, True)] if self._makes_loss(caller) else []
        has_names = any(self._names_at(point) for point in points[:_MAX_POINTS_WITH_VALUES])
        self._place, self._same = (None if has_names or sys.gettrace() is not None else place), points
        return points

    def _makes_loss(self, frame: FrameType) -> bool:
        """Whether a frame that calls backward also computes the loss; asked once per place in the code."""
        key = (id(frame.f_code), frame.f_lasti)
        if key not in self._own_losses:
            from torchmedic.source.segment.names import makes_loss

            self._own_losses[key] = (frame.f_code, makes_loss(frame, frame.f_lineno))
        return self._own_losses[key][1]

    def _names_at(self, point: Point) -> tuple[str, ...]:
        found = self._names.get((id(point.code), point.lasti, point.forward_lasti))
        return found[1] if found is not None else ()

    def _point(self, frame: FrameType, forward_lasti: int | None, with_values: bool) -> Point:
        code, lasti = frame.f_code, frame.f_lasti
        if not with_values or sys.gettrace() is not None:
            return Point(code, lasti, forward_lasti, {})
        key = (id(code), lasti, forward_lasti)
        found = self._names.get(key)
        if found is None:
            found = self._names[key] = (code, _names_of(frame, forward_lasti))
        return Point(code, lasti, forward_lasti, _values(frame, found[1]) if found[1] else {})


def _names_of(frame: FrameType, forward_lasti: int | None) -> tuple[str, ...]:
    """The variables that hold the data of a step; asked once per place in the code."""
    code = frame.f_code
    if sys.version_info < (3, 13) and looks_at_locals(code):
        return ()  # there is one dict of locals per frame: reading it here would change the user's
    from torchmedic.source.segment.names import data_names  # only needed where a device is read late

    forward_line = None if forward_lasti is None else line_of(code, forward_lasti)
    names = data_names(frame, frame.f_lineno, forward_line)
    values = frame.f_locals
    found = tuple(name for name in names if name in values and _is_data(values[name]))
    _let_go(frame, values)
    return found


def _is_data(value: Any) -> bool:
    return not issubclass(type(value), _NOT_DATA) and kept(value) is not GONE


def _values(frame: FrameType, names: tuple[str, ...]) -> dict[str, Any]:
    values = frame.f_locals
    found = {name: kept(values[name]) for name in names if name in values}
    _let_go(frame, values)
    return found


def _let_go(frame: FrameType, values: Any) -> None:
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
        # A function's: before 3.13 a copy kept by the frame. Left alone, it would hold every local past its time.
        values.clear()
