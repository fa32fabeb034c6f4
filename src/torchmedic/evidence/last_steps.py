"""Which of the last steps are run again: those of a copy of the weights from which the loss has grown.

Data that came from a queue, an environment or a buffer is gone with its step. The data of the present step is there,
and a cause such as too high a rate acts on this data as well: then the present step is run again and again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from types import FrameType

from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.step_data import data_of
from torchmedic.observe.context import StepContext
from torchmedic.observe.numbers.windows import Window, update_end
from torchmedic.observe.stages import UpdateStage
from torchmedic.records import Location
from torchmedic.replay.step.earlier_step import earlier_step
from torchmedic.replay.step.step import Step, from_stack, through_backward
from torchmedic.replay.trace.microscope import Microscope
from torchmedic.replay.trace.values import number
from torchmedic.replay.trajectory.change import AS_IT_WAS, NO_UPDATE, OTHER_SIGN
from torchmedic.replay.trajectory.course import MAX_SECONDS, Trajectory
from torchmedic.replay.trajectory.units import Unit, inner_places, place_of, units_of
from torchmedic.replay.trajectory.updates_by_hand import updating_op
from torchmedic.source.live_frames import stack_at
from torchmedic.source.segment.cut import CannotCut

_MAX_UPDATES = 8
_UPDATES_OF_SLOW_STEPS = 4
_REPETITIONS = 2  # of so many updates, where a loss stands still
_SECONDS_OF_STANDSTILL = 5.0
_STILL = 0.001  # of the loss in these updates: thousands of them would be needed
_MAX_COURSES = 12
_MIN_COURSES = 3  # without which nothing can be told
_GROWN = 3.0  # times the loss that the same batch has with the weights of before
_GROWN_SLOWLY = 1.2  # times that loss, where it is known that the loss grows over many more updates
_GROWN_WEIGHTS = 5.0  # times their largest magnitude
_MIN_LATER = 3  # losses after the steps that are run again, of which most are at the level of before
_COPIES_WITHIN = 2  # times the seconds for one copy, after which no other is tried
_TOO_LONG = "it would take too long"
_FAR_WEIGHTS = 0.5  # of their own size: how far the weights are from the copy, where a loss is not finite


def divergences(
    frame: FrameType | None,
    agent: StepContext,
    stage: UpdateStage | None,
    *,
    beyond_doubt: bool = False,
    within: float = MAX_SECONDS,
) -> Iterator[tuple[Divergence | None, str]]:
    """The last steps from each copy from which the loss has grown; at the end None, and why no other can be run again.

    Args:
        frame: Somewhere below the loop.
        agent: The process.
        stage: What the frame is doing; None where an exception ended the step.
        beyond_doubt: Whether training must have been lost in these steps.
        within: Seconds in which the steps of a copy must be expected to be explained.
    """
    memory = agent.finite.memory
    why = memory.refused
    is_found = False
    windows = memory.windows()
    if windows and (windows[-1].calls[-1].loss or 0.0) < 0:
        windows.reverse()  # of a loss below zero, the terms that made it so decide by now
    end = time.thread_time() + (_COPIES_WITHIN * within if within < MAX_SECONDS else math.inf)
    for window in windows:
        if time.thread_time() > end:
            yield None, why or _TOO_LONG
            return
        updates = any(call.ends or call.by_hand for call in window.calls)
        is_known = memory.is_lost or memory.has_left  # the loss has grown, if not in these steps
        if len(window.calls) < 2 or not updates or not (is_known or _may_have_grown(window)):
            continue
        found, reason = _run_again(window, frame, agent, _GROWN_SLOWLY if is_known else _GROWN, within)
        # What happened long ago explains the present only if training was lost then.
        is_of_now = window.reaches_present or (window.is_departure and memory.has_left)
        for_long = memory.has_left and is_of_now
        is_over = found is not None and not window.is_departure and not found.is_falling
        if found is not None and is_over and _has_recovered(window, found):
            found, reason = None, "the loss grew, and came back to its level before the present step"
        is_certain = is_of_now and not beyond_doubt and found is not None and found.trajectory.is_exact
        if found is not None and (is_certain or found.is_beyond_doubt(for_long=for_long)):
            is_found = True
            yield found, ""
        why = why or reason
    is_wanted = not is_found and time.thread_time() < end
    rehearsed = _rehearse(windows, frame, agent, stage, within) if is_wanted else None
    if rehearsed is not None:
        yield rehearsed, ""
    yield None, why


def present_step_again(frame: FrameType | None, agent: StepContext, stage: UpdateStage) -> Divergence | None:
    """The present step, to be run again and again from the oldest copy, of a loss that stands still.

    None where the data is scaled, or where the steps move the loss.
    """
    windows = agent.finite.memory.windows()
    try:
        units = _rehearsal(frame, agent, stage) * _REPETITIONS
    except CannotCut:
        return None
    if not windows or not units or not any(data.is_unscaled for data in data_of(units)):
        return None
    trajectory = Trajectory(windows[0], units, frame, agent, is_rehearsed=True)
    course = trajectory.run(AS_IT_WAS) if trajectory.is_affordable(_MIN_COURSES, _SECONDS_OF_STANDSTILL) else None
    if course is None or not course.is_finite or not course.losses[-1] > (1 - _STILL) * course.losses[0] > 0:
        return None
    return Divergence(trajectory, course, course)


def update_by_hand(frame: FrameType | None, agent: StepContext, label: str) -> Location | None:
    """The line that updates the weights, of a loop without an optimizer whose steps do not repeat their losses."""
    windows = agent.finite.memory.windows()
    outer = (
        next((call for call in window.calls if call.by_hand and place_of(call) not in inner_places(window.calls)), None)
        for window in windows
    )
    for call in filter(None, outer):
        try:
            step, _ = earlier_step(call, frame, agent, to_update=True)
        except CannotCut:
            continue
        scope = Microscope()
        step.runner.play(scope)
        op = updating_op(step, scope)
        if op is not None and op.spot is not None:
            return op.spot.location("cause", label)
    return None


def _has_recovered(window: Window, found: Divergence) -> bool:
    """Whether the loss was at its level of before again, after the steps that were run again."""
    units = found.trajectory.units
    place = place_of(units[found.positions[0]].call)
    after = window.calls.index(units[-1].call) + 1 if units[-1].call in window.calls else len(window.calls)
    later = [call.loss for call in window.calls[after:] if place_of(call) == place and call.loss is not None]
    level = max(map(abs, found.losses(found.still)))
    sizes = sorted(abs(loss) if math.isfinite(loss) else math.inf for loss in later)
    return len(sizes) >= _MIN_LATER and sizes[len(sizes) // 2] <= level


def _may_have_grown(window: Window) -> bool:
    """Whether it is worth to run the steps again: the recorded losses or the weights have grown."""
    losses = [call.loss for call in window.calls if call.loss is not None]
    finite = [abs(loss) for loss in losses if math.isfinite(loss)]
    if not finite or not math.isfinite(losses[0]):
        return False
    if max(finite) > _GROWN / 2 * finite[0] or max(losses[1:], default=0.0) < 0:
        return True
    if len(finite) < len(losses) and not window.copy.distance() < _FAR_WEIGHTS:
        return True
    for tensor, value in window.copy.pairs():
        if tensor.requires_grad:
            now = float(tensor.detach().abs().amax())
            if not now <= _GROWN_WEIGHTS * float(value.abs().amax()) + 1e-6:
                return True
    return False


def _run_again(
    window: Window, frame: FrameType | None, agent: StepContext, grown: float, within: float
) -> tuple[Divergence | None, str]:
    try:
        units = list(units_of(window.calls, frame, agent, _MAX_UPDATES))
        trajectory = Trajectory(window, units, frame, agent, is_rehearsed=False)
        if not trajectory.is_affordable(_MAX_COURSES, within):
            units = list(units_of(window.calls, frame, agent, _UPDATES_OF_SLOW_STEPS))
            trajectory = Trajectory(window, units, frame, agent, is_rehearsed=False)
            if within < MAX_SECONDS and not trajectory.is_affordable(_MAX_COURSES, within):
                return None, _TOO_LONG
    except CannotCut as reason:
        return None, str(reason)
    return _grown_again(trajectory, grown)


def _rehearse(
    windows: list[Window], frame: FrameType | None, agent: StepContext, stage: UpdateStage | None, within: float
) -> Divergence | None:
    """The present step from the weights of the oldest copy from which the loss grows."""
    try:
        units = _rehearsal(frame, agent, stage)
    except CannotCut:
        return None
    for window in windows if units else ():
        trajectory = Trajectory(window, units, frame, agent, is_rehearsed=True)
        if not trajectory.is_affordable(_MAX_COURSES, within):
            return None
        found, _ = _grown_again(trajectory, _GROWN)
        if found is not None and found.is_beyond_doubt(for_long=False):
            return found
    return None


def _grown_again(trajectory: Trajectory, grown: float) -> tuple[Divergence | None, str]:
    """The steps, if the loss grows in them when they are run as they were."""
    if not trajectory.is_affordable(_MIN_COURSES):
        return None, _TOO_LONG
    original = trajectory.run(AS_IT_WAS) if trajectory.is_rehearsed else trajectory.settle()
    if not trajectory.is_affordable(_MIN_COURSES):
        return None, _TOO_LONG
    if original is None:
        return None, trajectory.why_not
    if trajectory.is_exact:
        trajectory.is_exact = trajectory.is_faithful(original)
    if not trajectory.is_exact and not trajectory.is_rehearsed and not trajectory.is_alike(original):
        then = ", ".join(number(loss) for loss in trajectory.recorded)
        return None, f"the steps did not repeat: {', '.join(map(number, original.losses))} where there was {then}"
    still = trajectory.run(NO_UPDATE)
    if still is None or not still.is_finite:
        return None, trajectory.why_not or "the loss is not finite with the weights of before either"
    found = Divergence(trajectory, original, still)
    if not found.has_grown_by(grown) and not found.keeps_falling:
        return None, "the loss did not grow"
    if _may_be_meant_to_grow(found):
        return None, "the value goes uphill, and it is no error: it may be meant to grow"
    return found, ""


def _rehearsal(frame: FrameType | None, agent: StepContext, stage: UpdateStage | None) -> list[Unit]:
    """The present step, as often as it is to be run; empty where it is not known what follows its backward call.

    Args:
        frame: Somewhere below the loop.
        agent: The process.
        stage: What the frame is doing; None where an exception ended the step.

    Raises:
        CannotCut: The present step cannot be run again either.
    """
    watch, optimizers = agent.finite, agent.clock.optimizers
    if not optimizers:
        return _by_hand(frame, agent)
    known = [call for call in agent.kept_backwards.calls if call.ends]
    followed = [end.optimizer() for end in known[-1].ends] if known else optimizers
    if not followed or None in followed or (not known and len(optimizers) > 1):
        return []
    # Of several losses or optimizers it is not known how many calls belong to an update.
    is_plain = len(watch.losses.trends) == len(optimizers) == 1
    calls = watch.losses.backwards // (watch.steps + (stage == "step")) if is_plain and watch.steps else 1
    step = _present_step(frame, agent, stage)
    units = []
    for further in range(_MAX_UPDATES):
        call = agent.kept_backwards.present(watch.steps + further)
        call.points = known[-1].points if known else []
        call.ends = tuple(update_end(optimizer) for optimizer in followed)
        units.append(Unit(call, step, True, (), max(1, calls)))
    return units


def _by_hand(frame: FrameType | None, agent: StepContext) -> list[Unit]:
    """The present turn of a loop that updates its weights itself."""
    calls = list(agent.kept_backwards.calls)
    inner = inner_places(calls)
    call = next((each for each in reversed(calls) if each.by_hand and place_of(each) not in inner), None)
    if call is None:
        return []
    step, _ = earlier_step(call, frame, agent, to_update=True)
    return [Unit(call, step, True, ())] * _MAX_UPDATES


def _present_step(frame: FrameType | None, agent: StepContext, stage: UpdateStage | None) -> Step:
    if stage is None:
        step = through_backward(stack_at(frame), agent)
    else:
        step = from_stack(frame, agent, include_failing=stage == "backward")
    step.runner.takes_over = True
    return step


def _may_be_meant_to_grow(found: Divergence) -> bool:
    """Whether a value of which nothing shows that it is an error follows its gradient upwards, as a reward does."""
    if found.is_falling or not found.original.is_finite or not found.turns(found.course(OTHER_SIGN)):
        return False
    found.first_step()  # reads the graph of the loss
    return found.trajectory.sign[0] <= 0
