"""The present step again and again from earlier weights, where the steps since then cannot be run again.

Data that came from a queue, an environment or a buffer is gone with its step. The data of the present step is there,
and a cause such as too high a rate acts on this data as well.
"""

from __future__ import annotations

from types import FrameType

from torchmedic.observe.context import StepContext
from torchmedic.observe.numbers.update_ends import update_end
from torchmedic.observe.stages import UpdateStage
from torchmedic.replay.step.earlier_step import earlier_step
from torchmedic.replay.step.step import Step, from_stack, on_to_backward
from torchmedic.replay.trajectory.units import Unit, inner_places, place_of


def rehearsal(frame: FrameType | None, agent: StepContext, stage: UpdateStage | None, updates: int) -> list[Unit]:
    """The present step, as often as it is to be run; empty where it is not known what follows its backward call.

    Args:
        frame: Somewhere below the loop.
        agent: The process.
        stage: What the frame is doing; None where an exception ended the step.
        updates: How many updates there are to be.

    Raises:
        CannotCut: The present step cannot be run again either.
    """
    watch, optimizers = agent.finite, agent.clock.optimizers
    if not optimizers:
        return _by_hand(frame, agent, updates)
    known = [call for call in agent.kept_backwards.calls if call.ends]
    followed = [end.optimizer() for end in known[-1].ends] if known else optimizers
    if not followed or None in followed or (not known and len(optimizers) > 1):
        return []
    # Of several losses or optimizers it is not known how many calls belong to an update.
    is_plain = len(watch.losses.trends) == len(optimizers) == 1
    calls = watch.losses.backwards // (watch.steps + (stage == "step")) if is_plain and watch.steps else 1
    step = _present_step(frame, agent, stage)
    units = []
    for number in range(updates):
        call = agent.kept_backwards.present(watch.steps + number)
        call.points = known[-1].points if known else []
        call.ends = tuple(update_end(optimizer) for optimizer in followed)
        units.append(Unit(call, step, True, (), max(1, calls)))
    return units


def _by_hand(frame: FrameType | None, agent: StepContext, updates: int) -> list[Unit]:
    """The present turn of a loop that updates its weights itself."""
    calls = list(agent.kept_backwards.calls)
    inner = inner_places(calls)
    call = next((each for each in reversed(calls) if each.by_hand and place_of(each) not in inner), None)
    if call is None:
        return []
    step, _ = earlier_step(call, frame, agent, to_update=True)
    return [Unit(call, step, True, ())] * updates


def _present_step(frame: FrameType | None, agent: StepContext, stage: UpdateStage | None) -> Step:
    if stage is None:
        step = on_to_backward(frame, agent)
    else:
        step = from_stack(frame, agent, include_failing=stage == "backward")
    step.runner.takes_over = True
    return step
