"""Training that runs away: the last steps are run again, as they were and with one thing changed.

What turns the course of the loss is the cause. The steps as they were must repeat the losses that were recorded, else
nothing is claimed.
"""

from __future__ import annotations

import itertools
import math
from types import FrameType
from typing import Any

from torchmedic.observe.context import StepContext
from torchmedic.observe.numbers.windows import Window
from torchmedic.replay.trace.microscope import Leaf, Microscope, Spot
from torchmedic.replay.trace.values import number
from torchmedic.replay.trajectory.change import NO_UPDATE, Change
from torchmedic.replay.trajectory.course import Course, Trajectory
from torchmedic.replay.trajectory.updates_by_hand import bound_again
from torchmedic.source.assignments import names_written
from torchmedic.source.segment.cut import CannotCut

_MAX_UPDATES = 8
_UPDATES_OF_SLOW_STEPS = 4
_MAX_COURSES = 12
_MIN_COURSES = 3  # without which nothing can be told
_GROWN = 3.0  # times the loss that the same batch has with the weights of before
_GROWN_SLOWLY = 1.2  # times that loss, where it is known that the loss grows over many more updates
_GROWN_BEYOND_DOUBT = 100.0  # times that loss: no overshoot of a healthy start
_GROWN_FOR_LONG = 8.0  # times the largest of those losses, where the loss has not come back for many updates
_GROWN_WEIGHTS = 10.0
_BOUND = 1.1  # times that loss: a course that stays below has not grown
_OUTLIER = 30.0  # times the usual loss of a batch
_MIN_FALLS = 3  # of a loss below zero
_MIN_RATIOS = 4
_STILL = 0.02  # of the loss: a change that is none
_SEVERAL_BOUND = 3.0  # with several optimizers, of which one may train against the other


class Divergence:
    """The last steps of a run whose loss has grown, ready to be run again."""

    def __init__(self, trajectory: Trajectory, original: Course, still: Course) -> None:
        self.trajectory = trajectory
        self.original = original
        self.still = still  # the losses without any update: what each batch would have given
        self._courses: dict[str, Course | None] = {}  # by the name of the change
        self.positions = trajectory.positions(original.losses)
        self.optimizers = _optimizers(trajectory)
        self._scope: Microscope | None = None
        self._is_seen = False

    def first_step(self) -> Microscope | None:
        """The first of the steps under the microscope: what its weights, which were not yet spoiled, do."""
        if not self._is_seen:
            self._is_seen = True
            self._scope = self.trajectory.look()
        return self._scope

    def update_spot(self) -> Spot | None:
        """The line of the loop that writes to the weights, where there is no optimizer."""
        scope = self.first_step()
        if scope is None:
            return None
        for op in reversed(scope.ops):
            written = [scope.source(value) for value in op.inputs if value.storage in op.written]
            if op.spot is not None and not op.derived and any(_is_trained(source) for source in written):
                return op.spot
        return self._rebinding_spot(scope)

    def _rebinding_spot(self, scope: Microscope) -> Spot | None:
        """The line that binds new tensors in place of the weights."""
        step = self.trajectory.units[0].step
        names = bound_again(step)
        for statement in reversed(step.runner.segment.statements):
            if not set(names).isdisjoint(names_written(statement)):
                lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
                spots = [op.spot for op in scope.ops if op.spot is not None and not op.node]
                return next((spot for spot in reversed(spots) if spot.line in lines), None)
        return None

    def course(self, change: Change) -> Course | None:
        """The course with one thing changed; None where it cannot be run."""
        if change.name not in self._courses:
            self._courses[change.name] = self.trajectory.run(change)
        return self._courses[change.name]

    def losses(self, course: Course) -> list[float]:
        """The losses of the backward call that went wrong."""
        return [course.losses[position] for position in self.positions if position < len(course.losses)]

    def turns(self, course: Course | None) -> bool:
        """Whether the loss stays finite and falls, batch by batch, below what the weights of before gave.

        A loss that ran away downwards falls in any case: nothing is proven by that.
        """
        if course is None or self.is_falling or not course.is_finite or len(course.losses) < len(self.still.losses):
            return False
        pairs = list(zip(self.losses(course), self.losses(self.still), strict=True))
        several = len(self.optimizers) > 1
        bound = _SEVERAL_BOUND if several else _BOUND
        size = max(abs(before) for _, before in pairs)
        slack = (bound - 1) * size
        if any(now > before + slack or now < before - 1e3 * size for now, before in pairs):
            return False
        later = pairs[len(pairs) // 2 :] if len(pairs) > 1 else []
        # Where there is nothing to learn, as from random targets, the loss at least does not grow.
        return several or (bool(later) and sum(now - before for now, before in later) <= _STILL * size * len(later))

    def falls(self, course: Course) -> bool:
        """Whether the loss of a course that turns gets smaller than without any update, not only no larger."""
        pairs = list(zip(self.losses(course), self.losses(self.still), strict=False))
        later = pairs[len(pairs) // 2 :]
        size = max((abs(before) for _, before in pairs), default=0.0)
        return bool(later) and sum(now - before for now, before in later) < -_STILL * size * len(later)

    def outcome(self, course: Course) -> str:
        """What the loss does in a course that turns, in words."""
        return "the loss falls" if self.falls(course) else "the loss no longer grows"

    def turns_alone(self, change: Change) -> bool:
        """Whether a change of the data turns the course, compared with the changed data and no update."""
        course = self.course(change)
        still = self.trajectory.run(change._replace(rate=0.0))
        if course is None or still is None or not still.is_finite:
            return False
        return Divergence(self.trajectory, self.original, still).turns(course)

    def is_bounded(self, course: Course, leave_out: int) -> bool:
        """Whether no loss is much larger than what the weights of before gave, except in one step."""
        for position, (now, before) in enumerate(zip(course.losses, self.still.losses, strict=False)):
            if position != leave_out and abs(now) > _SEVERAL_BOUND * max(abs(before), 1e-6):
                return False
        return len(course.losses) == len(self.still.losses)

    @property
    def is_falling(self) -> bool:
        """Whether the loss ran away downwards."""
        losses = self.losses(self.original)
        finite = [loss for loss in losses if math.isfinite(loss)]
        return len(finite) > 1 and finite[-1] < 0 and finite[-1] < finite[0]

    def is_beyond_doubt(self, *, for_long: bool) -> bool:
        """Whether training was lost in these steps.

        Args:
            for_long: Whether the loss has not come back to its level for many updates since.
        """
        if self.is_falling or _has_risen(self.original, self.still, _GROWN_BEYOND_DOUBT):
            return True
        now, before = self.losses(self.original), self.losses(self.still)
        if for_long and max(map(abs, now)) > _GROWN_FOR_LONG * max(map(abs, before)):
            return True
        return len(set(self.positions)) == len(self.trajectory.units) and _grows_steadily(now, before)

    @property
    def has_grown(self) -> bool:
        """Whether the loss or the weights grew at all in these steps: a loss below zero may only have kept falling."""
        return _has_grown(self.original, self.still, _GROWN)

    @property
    def has_outlier(self) -> bool:
        """Whether some batches have many times the loss of others, whatever the weights."""
        sizes = sorted(abs(loss) for loss in self.losses(self.still))
        return sizes[-1] > _OUTLIER * max(sizes[len(sizes) // 2], 1e-12)

    @property
    def tried_on(self) -> str:
        """Which steps were run again, in words."""
        calls = [unit.call for unit in self.trajectory.units if unit.is_update]
        if not self.trajectory.reaches_present:
            return f"your updates {calls[0].update} to {calls[-1].update}"
        return f"your last {len(calls)} updates" if len(calls) > 1 else "your last update"

    def shown(self, course: Course) -> str:
        """The losses of a course in words: the first ones and the last one."""
        losses = [f"{loss:.3g}" for loss in self.losses(course)]
        middle = losses[3:-1]
        return ", ".join([*losses[:3], *(["..."] if len(middle) > 1 else middle), *losses[3:][-1:]])


def _is_trained(source: Any) -> bool:
    return isinstance(source, Leaf) and source.tensor.requires_grad


def _optimizers(trajectory: Trajectory) -> list[Any]:
    found = {
        id(optimizer): optimizer
        for unit in trajectory.units
        for end in unit.call.ends
        if (optimizer := end.optimizer()) is not None
    }
    return list(found.values())


def _has_risen(original: Course, still: Course, factor: float) -> bool:
    pairs = zip(original.losses, still.losses, strict=False)
    return any(math.isfinite(now) and abs(now) > factor * abs(before) + 1e-6 for now, before in pairs)


def _has_grown(original: Course, still: Course, factor: float) -> bool:
    if _has_risen(original, still, factor):
        return True
    return any(not size <= _GROWN_WEIGHTS * original.weights[0] for size in original.weights)  # NaN is not either


def _may_have_grown(window: Window) -> bool:
    """Whether it is worth to run the steps again: the recorded losses or the weights have grown."""
    losses = [call.loss for call in window.calls if call.loss is not None]
    finite = [abs(loss) for loss in losses if math.isfinite(loss)]
    if not finite or not math.isfinite(losses[0]):
        return False
    if max(finite) > _GROWN / 2 * finite[0] or max(losses[1:], default=0.0) < 0:
        return True
    for reference, value in window.copy.tensors:
        tensor = reference()
        if tensor is not None and tensor.requires_grad:
            now = float(tensor.detach().abs().amax())
            if not now <= _GROWN_WEIGHTS / 2 * float(value.abs().amax()) + 1e-6:
                return True
    return False


def _grows_steadily(now: list[float], before: list[float]) -> bool:
    """Whether every update adds to a loss, so that the last ones are notably larger."""
    ratios = [one / other for one, other in zip(now, before, strict=False) if other > 0][1:]
    rises = sum(later > earlier for earlier, later in itertools.pairwise(ratios))
    is_steady = len(ratios) >= _MIN_RATIOS and min(ratios) > 1 and rises >= len(ratios) - 2
    return is_steady and ratios[-1] > _GROWN_SLOWLY


def divergence_of(frame: FrameType | None, agent: StepContext) -> tuple[Divergence | None, str]:
    """The last steps, if the loss has grown in them; else None, and why they cannot be run again."""
    memory = agent.finite.memory
    why = memory.refused
    windows = memory.windows()
    if windows and (windows[-1].calls[-1].loss or 0.0) < 0:
        windows.reverse()  # of a loss below zero, the terms that made it so decide by now
    for window in windows:
        updates = any(call.ends or call.by_hand for call in window.calls)
        is_known = memory.is_lost or memory.is_far  # the loss has grown, if not in these steps
        if len(window.calls) < 2 or not updates or not (is_known or _may_have_grown(window)):
            continue
        found, reason = _run_again(window, frame, agent, _GROWN_SLOWLY if is_known else _GROWN)
        if found is not None:
            return found, ""
        why = why or reason
    return None, why


def _run_again(
    window: Window, frame: FrameType | None, agent: StepContext, grown: float
) -> tuple[Divergence | None, str]:
    try:
        trajectory = Trajectory(window, frame, agent, _MAX_UPDATES)
        if not trajectory.is_affordable(_MAX_COURSES):
            trajectory = Trajectory(window, frame, agent, _UPDATES_OF_SLOW_STEPS)
    except CannotCut as reason:
        return None, str(reason)
    too_long = "it would take longer than a minute"
    if not trajectory.is_affordable(_MIN_COURSES):
        return None, too_long
    original = trajectory.settle()
    if not trajectory.is_affordable(_MIN_COURSES):
        return None, too_long
    if original is None:
        return None, trajectory.why_not
    if not trajectory.is_faithful(original):
        then = ", ".join(number(loss) for loss in trajectory.recorded)
        return None, f"the steps did not repeat: {', '.join(map(number, original.losses))} where there was {then}"
    still = trajectory.run(NO_UPDATE)
    if still is None or not still.is_finite:
        return None, trajectory.why_not or "the loss is not finite with the weights of before either"
    found = Divergence(trajectory, original, still)
    if not _has_grown(original, still, grown) and not (found.is_falling and _keeps_falling(found)):
        return None, "the loss did not grow"
    return found, ""


def _keeps_falling(divergence: Divergence) -> bool:
    """Whether every update takes a loss that is below zero further down."""
    pairs = list(zip(divergence.losses(divergence.original), divergence.losses(divergence.still), strict=False))[1:]
    return len(pairs) >= _MIN_FALLS and all(now < before < 0 for now, before in pairs if math.isfinite(now))
