"""Changes to the step that ran out of memory, each played on fake tensors and held against the memory there is.

A prediction is believed only if the same prediction says of the step as it was that it does not fit, at the phase at
which it failed or before. Nothing is run on the device: what is said here is predicted, and no more.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchmedic.evidence.memory.cures.real_step import RealStep
from torchmedic.evidence.memory.cures.room import Room, room_of
from torchmedic.evidence.memory.fake.peak import Counting, highest
from torchmedic.evidence.memory.fake.rows import Rows, rows_in
from torchmedic.evidence.memory.fake.whole_step import Change, WholeStep
from torchmedic.observe.memory.host import host_memory
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.replay.fake.births import Course, between
from torchmedic.replay.fake.changes import repeated_layers
from torchmedic.replay.step.step import Step, through_backward
from torchmedic.source.live_frames import stack_of_traceback
from torchmedic.source.segment.cut import CannotCut

if TYPE_CHECKING:
    from torchmedic.evidence.memory.autopsy import Autopsy

SECONDS = 5.0  # for all trials of one failure
_MAX_REPLAY_BYTES = 256 << 20  # bytes of the address space that a replay may need at most
_MAX_NEEDED_SHARE = 0.9  # share of what the step needs: a change that saves less is none


class Tried(NamedTuple):
    """One change and what the process would need with it."""

    change: Change
    needed: int
    fits: bool


class Prediction(NamedTuple):
    """The bytes that the step needs as it is and with each change, and the bytes that there are."""

    room: Room
    unchanged: int
    tried: tuple[Tried, ...]
    unpredicted: tuple[Change, ...]  # what may help as well, if it were tried

    @property
    def fitting(self) -> list[Tried]:
        return [each for each in self.tried if each.fits]


def predict(autopsy: Autopsy, *, evaluation: bool = False) -> Prediction | str:
    """Predict the need of the step and of each possible cure; a text says why that was not possible."""
    if autopsy.is_long:
        return "the step takes too long on fake tensors"
    try:
        with autopsy.default_device or contextlib.nullcontext():
            return _Trials(autopsy, evaluation).run()
    except CannotCut as reason:
        return str(reason)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class _Distrust(Exception):
    """The prediction does not agree with what has happened."""


class _Trials:
    def __init__(self, autopsy: Autopsy, evaluation: bool) -> None:
        self._deadline = time.monotonic() + SECONDS
        self._autopsy = autopsy
        self._evaluation = evaluation
        if _is_cramped():
            raise _Distrust("there is no room to look around in")
        if autopsy.replayed is None and not autopsy.in_optimizer:
            raise _Distrust(autopsy.why_not_replayed)  # fakes could not follow it even that far
        self._step = whole_step_of(autopsy, evaluation=evaluation)
        self._rows = rows_of(autopsy, self._step)
        room = room_of(autopsy, self._step, self._rows)
        if room is None:
            raise _Distrust("how much memory there is is not known")
        if not autopsy.exhaustion.on_device and any(_is_lstm(root) for root in self._step.modules):
            raise _Distrust("on the host an LSTM keeps more than fakes know of")
        self._room = room
        # Of the optimizers, which no change changes: what their first step leaves, and the most that they have at once.
        self._state = self._update = 0

    def run(self) -> Prediction:
        started = time.monotonic()
        first = self._step.count(Change(updates=not self._evaluation), self._deadline)
        seconds = time.monotonic() - started
        if self._room.has(self._room.needed(self._made_until_failure(first))):
            raise _Distrust("by the same prediction, the step as it was would fit")
        self._update = first.live.by_phase.get("optimizer", 0)
        self._state = first.new_state
        unchanged = self._tried(Change(), highest(_course(first))).needed
        tried = []
        for change in self._changes(first):
            started = time.monotonic()
            if started + seconds > self._deadline:
                break
            try:
                found = self._try(change, first)
            except Exception:
                continue  # fakes cannot follow this one
            seconds = min(seconds, time.monotonic() - started)  # the first one had to make its fakes
            if found.needed < _MAX_NEEDED_SHARE * unchanged:
                tried.append(found)
                if found.fits and self._evaluation:
                    break
        return Prediction(self._room, unchanged, tuple(tried), tuple(self._unpredicted(first)))

    def _made_until_failure(self, first: Counting) -> int:
        """Bytes that the failing step had made. It may have been the first, without gradients and state from before."""
        autopsy, phases = self._autopsy, first.live.by_phase
        reached = {"forward": True, "backward": autopsy.in_backward or autopsy.in_optimizer}
        made = max((made for phase, made in phases.items() if reached.get(phase, autopsy.in_optimizer)), default=0)
        lent = [
            like for leaf, like in self._step.first_gradients if leaf.grad is None and autopsy.is_wanted(like.device)
        ]
        return made - sum(tensor.nbytes for tensor in lent)

    def _changes(self, first: Counting) -> Iterator[Change]:
        grad = False if self._evaluation else None
        if self._evaluation:
            yield Change(grad=False)
        if self._rows is not None:
            yield Change(rows=Rows(self._rows // 2, self._rows), grad=grad)
        if self._evaluation or not self._autopsy.exhaustion.on_device:
            return
        modules = _repeated(first, self._step)
        if modules:
            yield Change(checkpointed=modules)
        kind = self._autopsy.exhaustion.where
        if not first.has_half and kind in ("cuda", "xpu") and _is_full_precision(self._step):
            yield Change(autocast=kind)

    def _unpredicted(self, first: Counting) -> Iterator[Change]:
        """Changes to try without a prediction: how the allocator of the host splits memory is not known well enough."""
        if (
            not self._evaluation
            and not self._autopsy.exhaustion.on_device
            and (modules := _repeated(first, self._step))
        ):
            yield Change(checkpointed=modules)

    def _try(self, change: Change, first: Counting) -> Tried:
        played = self._step.count(change._replace(updates=False), self._deadline)
        if change.rows is not None:
            return self._fewest_cut(change, change.rows, first, played)
        return self._tried(change, self._room.made(_course(played)))

    def _tried(self, change: Change, made: int) -> Tried:
        share = 1.0
        if change.rows is not None:
            share = change.rows.kept / change.rows.of
            if not self._evaluation:
                made += self._step.later_gradients  # it takes several such steps for one update
        needed = self._room.needed(max(made + self._state, self._update), share)
        return Tried(change, needed, self._room.has(needed))

    def _fewest_cut(self, change: Change, half: Rows, first: Counting, played: Counting) -> Tried:
        """The largest half of a half that fits; one row if none does. The two courses tell of all the others."""
        found = self._tried(change, self._room.made(_course(played)))
        rows = half
        while not found.fits and rows.kept > 1:
            rows = Rows(rows.kept // 2, rows.of)
            change = change._replace(rows=rows)
            share = (rows.of - rows.kept) / (rows.of - half.kept)
            course = between(_course(first), _course(played), share)
            if course is None or rows.kept == 1:  # not every layer takes a single row
                course = _course(self._step.count(change._replace(updates=False), self._deadline))
            found = self._tried(change, self._room.made(course))
        return found


def real_step_of(autopsy: Autopsy, *, evaluation: bool) -> RealStep:
    """The step from its beginning through its backward, to be run for real."""
    step = _whole(autopsy, evaluation)
    return RealStep.after(_on(autopsy, step), step, evaluation=evaluation)


def _on(autopsy: Autopsy, step: Step) -> WholeStep:
    return WholeStep.on(step.runner, autopsy.is_wanted, accumulates=_accumulates(autopsy))


def whole_step_of(autopsy: Autopsy, *, evaluation: bool) -> WholeStep:
    """The step from its beginning through its backward."""
    return _on(autopsy, _whole(autopsy, evaluation))


def rows_of(autopsy: Autopsy, step: WholeStep) -> int | None:
    """The number of rows of the batch; None if it is not clear."""
    incident = autopsy.evidence.incident
    return rows_in(incident.batch, incident.batch_indices, autopsy.process.batches.shapes, step.modules)


def _course(ledger: Counting) -> Course:
    assert ledger.course is not None
    return ledger.course


def _whole(autopsy: Autopsy, evaluation: bool) -> Step:
    if evaluation or autopsy.in_backward or autopsy.in_optimizer:
        if autopsy.step is None:
            raise CannotCut(autopsy.why_not_replayed)
        return autopsy.step
    try:
        return autopsy.evidence.step_through_backward()
    except CannotCut:
        stack = stack_of_traceback(autopsy.evidence.error.__traceback__)
        return through_backward(stack, autopsy.process, by_library=True)


def _accumulates(autopsy: Autopsy) -> bool:
    """Whether the present gradients were there when the step began."""
    if not (autopsy.in_backward or autopsy.in_optimizer):
        return True
    own = 1 if autopsy.in_optimizer else 0
    if autopsy.process.clock.micro_step > own:
        return True
    trained = parameters_of(*autopsy.process.clock.optimizers)
    return not autopsy.in_optimizer and bool(trained) and all(tensor.grad is not None for tensor in trained)


def _is_cramped() -> bool:
    """Whether the limit of the address space leaves too little for replays, which must not end the process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = host_memory().address_space
    return soft != resource.RLIM_INFINITY and taken is not None and soft - taken < _MAX_REPLAY_BYTES


def _is_lstm(root: torch.nn.Module) -> bool:
    return any(isinstance(module, torch.nn.LSTM) for module in root.modules())


def _is_full_precision(step: WholeStep) -> bool:
    return all(each.dtype == torch.float32 for each in step.leaves if each.is_floating_point())


def _repeated(ledger: Counting, step: WholeStep) -> tuple[torch.nn.Module, ...]:
    """The modules of one class, none inside another, that together save most for backward."""
    names = step.names()
    saved: dict[str, int] = {}
    for entry in ledger.saved.values():
        parts = entry.place.module.split(".") if entry.place.module else []
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            saved[path] = saved.get(path, 0) + entry.nbytes
    layers = {id(module): module for root in step.modules for module in root.modules() if module is not root}
    saving = [module for module in layers.values() if saved.get(names.get(id(module), ""), 0)]
    groups = repeated_layers(saving)
    return tuple(max(groups, key=lambda group: sum(saved[names[id(each)]] for each in group), default=()))
