"""Training that runs away: the last steps are run again, as they were and with one thing changed.

What turns the course of the loss is the cause. The steps as they were must repeat the losses that were recorded, else
nothing is claimed.
"""

from __future__ import annotations

import itertools
import math
from statistics import median
from typing import Any

from torchmedic.replay.trace.microscope import Microscope, Op
from torchmedic.replay.trajectory.change import Change
from torchmedic.replay.trajectory.course import Course, Trajectory
from torchmedic.replay.trajectory.updates_by_hand import updating_op

_GROWN = 3.0  # times the loss that the same batch has with the weights of before
_GROWN_SLOWLY = 1.2  # times that loss, where every update adds to it
_GROWN_BEYOND_DOUBT = 100.0  # times that loss: no overshoot of a healthy start
_GROWN_FOR_LONG = 3.0  # times the largest of those losses, where the loss has not come back for many updates
_GROWN_WEIGHTS = 10.0  # times their largest magnitude, or their size as a distance
_FAR_WEIGHTS = 0.5  # of their own size: how far the weights are from where they were, when a loss is not finite
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

    def outlying_step(self) -> Microscope | None:
        """The step whose batch has many times the loss of the others, whatever the weights; None where none has."""
        sizes = {at: abs(self.still.losses[at]) for at in self.positions}
        return self.trajectory.look(max(sizes, key=sizes.__getitem__)) if self.has_outlier else None

    def update_op(self) -> Op | None:
        """The operation of the loop that writes to the weights, where there is no optimizer."""
        scope = self.first_step()
        return updating_op(self.trajectory.units[0].step, scope) if scope is not None else None

    def factors_of_update(self) -> list[float]:
        """How many times larger than its tensors an update by hand is: one of the factors may be the rate."""
        scope, op = self.first_step(), self.update_op()
        if scope is None or op is None:
            return []
        made = [source for value in op.inputs if isinstance(source := scope.source(value), int)]
        values = [*op.inputs, *(value for index in made for value in scope.ops[index].inputs)]
        sizes = [size for value in values if (size := scope.magnitude(value)) > 0]
        # The update itself is not seen where the operation multiplies as well: `p.add_(gradient, alpha=-rate)`.
        moves = [float(move.abs().amax()) for _, move in self.trajectory.first_update]
        found = {float(f"{move / size:.4g}") for move in (*sizes, *moves) for size in sizes}
        return sorted(factor for factor in found if factor not in (0.0, 1.0))

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
        if self.original.is_finite and not _has_risen(self.original, self.still, _GROWN_SLOWLY) and _is_away(course):
            return False  # the loss of the step after would show it
        if not self._is_above(self.original) and not _weights_have_grown(self.original):
            return False  # what the updates add is small beside what other batches give without any update
        pairs = list(zip(self.losses(course), self.losses(self.still), strict=True))
        size = max(abs(before) for _, before in pairs)
        if self._is_above(course) or any(now < before - 1e3 * size for now, before in pairs):
            return False
        several = len(self.optimizers) > 1
        later = pairs[len(pairs) // 2 :] if len(pairs) > 1 else []
        # Where there is nothing to learn, as from random targets, the loss at least does not grow.
        return several or (bool(later) and sum(now - before for now, before in later) <= _STILL * size * len(later))

    def _is_above(self, course: Course) -> bool:
        """Whether a loss is notably above what its batch gives with the weights of before, or is not finite."""
        before = self.losses(self.still)
        bound = _SEVERAL_BOUND if len(self.optimizers) > 1 else _BOUND
        slack = (bound - 1) * max(map(abs, before))
        pairs = zip(self.losses(course), before, strict=False)
        return not course.is_finite or any(now > usual + slack for now, usual in pairs)

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
        overflows = not self.original.is_finite and max(self.original.distances) >= _FAR_WEIGHTS
        if self.is_falling or overflows or _has_risen(self.original, self.still, _GROWN_BEYOND_DOUBT):
            return True
        now, before = self.losses(self.original), self.losses(self.still)
        if for_long and max(map(abs, now)) > _GROWN_FOR_LONG * max(map(abs, before)):
            return True
        return len(set(self.positions)) == len(self.trajectory.units) and _grows_steadily(now, before)

    @property
    def has_grown(self) -> bool:
        """Whether the loss or the weights grew at all in these steps: a loss below zero may only have kept falling."""
        return self.has_grown_by(_GROWN)

    def has_grown_by(self, factor: float) -> bool:
        """Whether a loss grew by a factor, or the weights did, or a loss overflowed far from the weights of before."""
        return self._is_larger_by(factor) or (
            not self.original.is_finite and max(self.original.distances) >= _FAR_WEIGHTS
        )

    @property
    def is_only_far(self) -> bool:
        """Whether nothing has grown: a number is bad, and the weights are far from those of before."""
        return not self._is_larger_by(_GROWN)

    def _is_larger_by(self, factor: float) -> bool:
        return _has_risen(self.original, self.still, factor) or _weights_have_grown(self.original)

    @property
    def keeps_falling(self) -> bool:
        """Whether every update takes a loss that is below zero further down."""
        pairs = list(zip(self.losses(self.original), self.losses(self.still), strict=False))[1:]
        is_long = self.is_falling and len(pairs) >= _MIN_FALLS
        return is_long and all(now < before < 0 for now, before in pairs if math.isfinite(now))

    @property
    def has_outlier(self) -> bool:
        """Whether some batches have many times the loss of others, whatever the weights."""
        sizes = sorted(abs(loss) for loss in self.losses(self.still))
        return sizes[-1] > _OUTLIER * max(sizes[len(sizes) // 2], 1e-12)

    @property
    def tried_on(self) -> str:
        """Which steps were run again, in words."""
        calls = [unit.call for unit in self.trajectory.units if unit.is_update]
        if self.trajectory.is_rehearsed:
            return f"the present batch: {len(calls)} updates from the weights of update {self.trajectory.begins_at}"
        if not self.trajectory.reaches_present:
            return f"your updates {calls[0].update} to {calls[-1].update}"
        return f"your last {len(calls)} updates" if len(calls) > 1 else "your last update"

    def shown(self, course: Course) -> str:
        """The losses of a course in words: the first ones and the last one, without a batch that was left out."""
        wanted = [at for at in self.positions if at < len(course.losses) and at != course.change.without]
        losses = [f"{course.losses[at]:.3g}" for at in wanted]
        middle = losses[3:-1]
        return ", ".join([*losses[:3], *(["..."] if len(middle) > 1 else middle), *losses[3:][-1:]])


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
    usual = median(map(abs, still.losses))  # of single items, some have next to no loss
    # A loss of 0, as of a hinge, is no measure of another one.
    return any(
        math.isfinite(now) and abs(now) > factor * (max(abs(before), usual) or 1.0) + 1e-6 for now, before in pairs
    )


def _weights_have_grown(course: Course) -> bool:
    grown = any(not size <= _GROWN_WEIGHTS * course.weights[0] for size in course.weights)  # NaN is not either
    return grown or max(course.distances) >= _GROWN_WEIGHTS


def _is_away(course: Course) -> bool:
    """Whether the weights at the end of a course are others."""
    return course.weights[-1] > _GROWN * course.weights[0] or course.distances[-1] > 1


def _grows_steadily(now: list[float], before: list[float]) -> bool:
    """Whether every update adds to a loss, so that the last ones are notably larger."""
    ratios = [one / other for one, other in zip(now, before, strict=False) if other > 0][1:]
    rises = sum(later > earlier for earlier, later in itertools.pairwise(ratios))
    is_steady = len(ratios) >= _MIN_RATIOS and min(ratios) > 1 and rises >= len(ratios) - 2
    return is_steady and ratios[-1] > _GROWN_SLOWLY
