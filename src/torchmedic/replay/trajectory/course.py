"""The course of the loss over the last steps, run again as they were or with one thing changed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from torchmedic.observe.context import StepContext
from torchmedic.observe.numbers.kept_steps import KeptBackward
from torchmedic.observe.numbers.windows import Window
from torchmedic.replay.step.earlier_step import EarlierStepRunner, earlier_step
from torchmedic.replay.step.result import ReplayResult
from torchmedic.replay.step.step import Step
from torchmedic.replay.trace.microscope import Microscope, Op
from torchmedic.replay.trajectory.change import AS_IT_WAS, Change, Gradients, are_finite, changed_gradients
from torchmedic.replay.trajectory.loss_sign import LossSign, sign_of_loss
from torchmedic.replay.trajectory.reduction import Reduction, reduction_of
from torchmedic.replay.trajectory.repetition import EQUAL, SAME, difference_of, grow_alike
from torchmedic.replay.trajectory.state import rewound, update, with_followers
from torchmedic.replay.trajectory.terms import Term, terms_of, weakened
from torchmedic.replay.trajectory.units import WAYS, Unit, Way, ending_at, place_of, stepping, taking, unscaled
from torchmedic.replay.trajectory.updates_by_hand import move, rebound, taking_moves
from torchmedic.source.segment.cut import CannotCut

MAX_SECONDS = 60.0  # of all courses together; on the CPU the time of this thread, as others may take the processor
_MAX_WALL_SECONDS = 180.0


class Course(NamedTuple):
    """The losses of one run of the steps; cut short where a gradient stopped being finite."""

    change: Change
    losses: tuple[float, ...]  # one per backward call that is looked at
    weights: tuple[float, ...]  # the largest magnitude of a weight, before the steps and after every update
    distances: tuple[float, ...]  # how far the weights are from where they were, in multiples of their size

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.losses))


class Trajectory:
    """The last steps, ready to be run again from a copy of the weights."""

    def __init__(
        self, window: Window, units: Sequence[Unit], frame: FrameType | None, agent: StepContext, *, is_rehearsed: bool
    ) -> None:
        self._copy = with_followers(window.copy, units[0].step.runner.modules)
        self._rewound = {id(tensor): tensor for tensor, _ in window.copy.pairs()}
        self._frame, self._agent = frame, agent
        self._others: dict[int, Step] = {}
        self.units = units
        self.is_rehearsed = is_rehearsed  # the units are the present step, not the steps that there were
        self._module_calls: dict[Any, int] = {}  # of a step that is rehearsed, by its backward call
        self.begins_at = window.copy.update
        self.reaches_present = units[-1].call is window.calls[-1] and window.reaches_present
        on_cpu = all(value.is_cpu for _, value in self._copy.tensors)
        self._now = time.thread_time if on_cpu else time.monotonic  # a device works while this thread waits
        self._deadline = time.monotonic() + _MAX_WALL_SECONDS
        self._ways: tuple[Way, ...] = ()  # to run a step; empty once they are settled
        self._first: tuple[float, Gradients] | None = None  # loss and gradients of the first step
        self.reduction = Reduction(1.0)  # of the loss of the first step; filled by `look`
        self.reduced_at: Op | None = None  # the operation that adds the elements of that loss up; filled by `look`
        self.sign = LossSign(0)  # of the loss of the first step; filled by `look`
        self.terms: list[Term] = []  # of the loss of the first step; filled by `look`
        self.is_exact = not is_rehearsed  # the steps repeat their recorded losses
        self.seconds = 0.0
        self._step_seconds = 0.0  # that one takes; 0: not yet known
        self.why_not = ""

    @property
    def recorded(self) -> tuple[float, ...]:
        """The losses that the steps had."""
        return tuple(math.nan if unit.call.loss is None else unit.call.loss for unit in self.units)

    @property
    def first_update(self) -> Gradients:
        """The gradients of the first step, or its changes of the weights where it makes these by hand."""
        return self._first[1] if self._first is not None else []

    def is_affordable(self, courses: int, within: float = MAX_SECONDS) -> bool:
        """Whether so many courses more can be expected to end in so many seconds, by a run of the first step."""
        if not self._step_seconds:
            started = self._now()
            with rewound(self._copy), contextlib.suppress(_Stopped):  # `settle` says why
                self._step(self.units[0], AS_IT_WAS)
            self._step_seconds = self._now() - started
        return self.seconds + courses * len(self.units) * self._step_seconds < within

    def is_faithful(self, course: Course) -> bool:
        """Whether the course is what happened, at the backward call whose loss went wrong: a GAN has another."""
        recorded = self.recorded
        asked = self.positions(recorded)
        pairs = [(course.losses[at], recorded[at]) for at in asked if at < len(course.losses)]
        end = next((position for position, loss in enumerate(recorded) if not math.isfinite(loss)), len(recorded))
        is_whole = any(math.isfinite(then) for _, then in pairs) and len(course.losses) >= end
        return is_whole and all(self._difference(now, then) <= SAME for now, then in pairs)

    def is_alike(self, course: Course) -> bool:
        """Whether the losses grow as the recorded ones did: random numbers of the steps may be others."""
        return grow_alike(course.losses, self.recorded)

    def _difference(self, now: float, then: float | None) -> float:
        return difference_of(now, then, is_scaled=self._agent.finite.losses.are_scaled_late)

    def positions(self, losses: Sequence[float]) -> list[int]:
        """The steps of the backward call whose loss has gone wrong."""
        worst = max(range(len(losses)), key=lambda at: abs(losses[at]) if math.isfinite(losses[at]) else math.inf)
        places = [place_of(unit.call) for unit in self.units]
        return [at for at, place in enumerate(places) if place == places[worst]]

    def settle(self) -> Course | None:
        """Run the steps as they were, each in the way that repeats its recorded loss.

        Where the random state of a step was not known, the state of its forward pass or of a call before it is used, or
        the data that the step drew is taken over.
        """
        self._ways = WAYS
        try:
            return self.run(AS_IT_WAS)
        finally:
            self._ways = ()

    def run(self, change: Change) -> Course | None:
        """Run the steps. None where that cannot be done; `why_not` says why."""
        started = self._now()
        try:
            with rewound(self._copy, with_state=not change.fresh):
                sizes = [(self._largest_weight(), 0.0)]
                losses = list(self._losses(change, sizes))
        except _Stopped as stop:
            self.why_not = str(stop)
            return None
        finally:
            self.seconds += self._now() - started
        return Course(change, tuple(losses), *zip(*sizes, strict=True))

    def look(self, at: int = 0) -> Microscope | None:
        """A step under the microscope, with the weights of the copy; of the first one the loss is read as well."""
        step = self.units[at].step
        scope = Microscope(deadline=self._deadline, watch=step.runner.parameters)
        with rewound(self._copy):
            played = step.runner.play(scope, unscaled(), ending_at(stepping(self.units[at])))
            if played.error is not None:
                return None
            scope.read()
            if played.roots and at == 0:
                self.reduction = reduction_of(played.roots[-1])
                self.reduced_at = scope.op_of(self.reduction.node) if self.reduction.node is not None else None
                self.sign = sign_of_loss(played.roots[-1], scope)
                self.terms = terms_of(played.roots[-1], scope)
        return scope

    def _losses(self, change: Change, sizes: list[tuple[float, float]]) -> Iterator[float]:
        is_plain = change.data is None and change.term is None
        started = self._now()
        for position, unit in enumerate(self.units):
            self._check_time(started)
            if position == 0 and is_plain and self._first is not None:
                loss, gradients = self._first
            else:
                try:
                    loss, gradients = self._settled(position, change) if self._ways else self._step(unit, change)
                except _Stopped as stop:
                    if position == 0 or isinstance(stop, _Incomparable):
                        raise
                    # A sampler or a check of the script may refuse what the updates have made of the weights.
                    self.why_not = str(stop)
                    yield math.nan
                    return
                if position == 0 and is_plain:
                    self._first = (loss, gradients)
            yield loss
            if not unit.is_update or position == change.without:
                continue
            if not math.isfinite(loss) or not are_finite(gradients):
                return
            if unit.call.by_hand:
                move(gradients, change.rate * change.gradient)
            else:
                self._update(unit, gradients, change)
            sizes.append((self._largest_weight(), self._copy.distance()))

    def _check_time(self, started: float) -> None:
        if self.seconds + self._now() - started > MAX_SECONDS or time.monotonic() > self._deadline:
            raise _Stopped("it took too long")

    def _largest_weight(self) -> float:
        return max((float(tensor.detach().abs().amax()) for tensor in self._rewound.values()), default=0.0)

    def _settled(self, position: int, change: Change) -> tuple[float, Gradients]:
        """A step in the way that comes nearest to its recorded loss: to new weights most batches are nearly alike."""
        unit = self.units[position]
        previous = self.units[position - 1] if position else None
        runner = unit.step.runner
        state = (runner.frozen, unit.call.rng, unit.call.device_marks)

        def begin_again() -> None:
            runner.frozen, unit.call.rng, unit.call.device_marks = state
            if isinstance(runner, EarlierStepRunner):
                runner.takes_state_of_forward = False

        found: list[tuple[float, Way, tuple[float, Gradients]]] = []
        for way in self._ways:
            begin_again()
            if not way(unit, previous):
                continue
            step = self._step(unit, change)
            difference = self._difference(step[0], unit.call.loss)
            if difference <= EQUAL:
                return step
            found.append((difference, way, step))
        _, way, step = min(found, key=lambda each: each[0])
        begin_again()
        way(unit, previous)
        return step

    def _step(self, unit: Unit, change: Change) -> tuple[float, Gradients]:
        total: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        by_hand = unit.call.by_hand and unit.is_update
        played = self._play(unit.step, change, total, by_hand=by_hand, until=stepping(unit))
        if self.is_rehearsed and self._module_calls.setdefault(place_of(unit.call), played.module_calls) != (
            played.module_calls
        ):
            raise _Incomparable("the length of the step depends on the weights, as that of an episode does")
        roots = [root for root in played.roots if root.numel() == 1]
        loss = float(roots[-1].detach().item()) if roots else math.nan
        outside = max(0, len(unit.before) + 1 - len(played.backward_calls))
        for step in map(self._step_of, unit.before[:outside]):
            runner = step.runner
            if unit.step.runner.frozen and not runner.frozen and isinstance(runner, EarlierStepRunner):
                runner.freeze_data()
            self._play(step, change, total)
        return loss, [(tensor, gradient * unit.times) for tensor, gradient in total.values()]

    def _play(
        self,
        step: Step,
        change: Change,
        total: dict[int, tuple[torch.Tensor, torch.Tensor]],
        *,
        by_hand: bool = False,
        until: Any = None,
    ) -> ReplayResult:
        taken: Gradients = []
        collect = taking_moves(step, taken, list(self._rewound.values())) if by_hand else taking(step, taken)
        contexts = (collect, unscaled(), ending_at(until), weakened(change.term))
        played = step.runner.play(*contexts, change=change.data, keep_graphs=False)
        if played.error is not None:
            raise _Stopped(f"{type(played.error).__name__}: {played.error}"[:200])
        if by_hand:
            taken = rebound(step, played) or taken
        for tensor, gradient in taken:
            if id(tensor) not in self._rewound:
                continue  # trained only since the copy: an update of this tensor could not be undone
            known = total.get(id(tensor))
            total[id(tensor)] = (tensor, gradient if known is None else known[1] + gradient)
        return played

    def _step_of(self, call: KeptBackward) -> Step:
        if id(call) not in self._others:
            try:
                self._others[id(call)] = earlier_step(call, self._frame, self._agent)[0]
            except CannotCut as reason:
                raise _Stopped(str(reason)) from reason
        return self._others[id(call)]

    def _update(self, unit: Unit, gradients: Gradients, change: Change) -> None:
        changed = changed_gradients(gradients, change)
        started = self._now()

        def evaluate() -> tuple[float, Gradients]:
            self._check_time(started)
            loss, found = self._step(unit, change)
            return loss, changed_gradients(found, change)

        for end in unit.call.ends:
            optimizer = end.optimizer()
            if optimizer is None:
                raise _Stopped("an optimizer that made an update is gone")
            if not any(held.optimizer() is optimizer for held in self._copy.optimizers):
                raise _Stopped("an optimizer was made later")  # an update by it could not be undone
            factor = change.rate if change.only is None or change.only is optimizer else 1.0
            if factor == 0:
                continue
            factors = [factor if change.group in (None, at) else 1.0 for at in range(len(end.rates))]
            rates = [rate if rate is None else rate * each for rate, each in zip(end.rates, factors, strict=True)]
            try:
                update(optimizer, changed, rates, change.options, evaluate, end.momenta)
            except Exception as error:  # of an optimizer that is called in another way
                raise _Stopped(f"{type(error).__name__}: {error}"[:200]) from error


class _Stopped(Exception):
    """The steps cannot be run again."""


class _Incomparable(_Stopped):
    """The losses of the steps are no losses of the same thing."""
