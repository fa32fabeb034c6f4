"""The inner updates of a step are so large that the loss of the step explodes.

What: the step moves tensors along their own gradient, from `torch.autograd.grad`, before it computes its loss: the
inner loop of meta-learning, Langevin steps, a simulation. The step was run again with smaller inner updates and nothing
else changed. Without inner updates the loss is ordinary, as they were it is huge or not finite, and with smaller ones
the loss is at least as small as without them.

Why: an inner rate that is too high makes every inner update overshoot further, all within one step. The learning rate
of the optimizer is not at fault.

Cure: divide the inner rate by about the number that is named, or make fewer inner updates.
"""

from __future__ import annotations

import math

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import finish
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Treatment
from torchmedic.replay.step.step import Step, from_stack
from torchmedic.replay.trace.microscope import Microscope, Spot
from torchmedic.replay.trace.values import number
from torchmedic.replay.trajectory.updates_by_hand import damped, inner_update
from torchmedic.source.segment.cut import CannotCut

_DIVISORS = (3, 10, 30, 100, 300, 1000)
_GROWN = 10.0  # times the loss without inner updates
_BOUND = 1.05  # times that loss: smaller inner updates do not make it larger


@rule("TM239", "inner-step-too-large")
def check(evidence: NumbersEvidence) -> Draft | None:
    if evidence.step is None or (evidence.scope is None and not evidence.replay_once()):
        return None
    found = _with_inner_updates(evidence)
    if found is None:
        return None
    step, spot = found
    original, without = _loss(step, 1.0), _loss(step, 0.0)
    if original is None or without is None or not math.isfinite(without):
        return None
    size = max(abs(without), 1e-3)
    if math.isfinite(original) and abs(original) < _GROWN * size:
        return None
    for divisor in _DIVISORS:
        loss = _loss(step, 1 / divisor)
        is_ordinary = loss is not None and abs(loss) < _GROWN * size  # a loss below zero may have exploded as well
        if loss is None or not is_ordinary or loss > without + (_BOUND - 1) * size:
            continue
        draft = check.draft(evidence, "likely" if evidence.faithful is False else "proven")
        draft.message = f"the inner updates of the step are too large: they take the loss to {_shown(original)}"
        draft.cause = (
            f"the loss is {_shown(original)} with these updates, {number(loss)} with 1/{divisor} of them, "
            f"and {number(without)} without any"
        )
        draft.at(spot.location("cause", "tensors are moved along their own gradient here"))
        result = f"the loss as it was: {_shown(original)}; with smaller inner updates: {number(loss)}"
        title = f"divide the step size of the inner updates by about {divisor}"
        draft.treat(Treatment(title=title, safety="changes-training", proven=True, result=result))
        return finish(draft, evidence)
    return None


def _shown(loss: float) -> str:
    return number(loss) if math.isfinite(loss) else "NaN" if math.isnan(loss) else "infinity"


def _with_inner_updates(evidence: NumbersEvidence) -> tuple[Step, Spot] | None:
    """The step and the line of its inner updates; where an inner loss is bad itself, the loop around it is the step."""
    scope, played, step = evidence.scope, evidence.played, evidence.step
    op = inner_update(played, scope) if played is not None and scope is not None else None
    # Without an optimizer, `autograd.grad` may be all of the training.
    is_inner = played is not None and bool(played.backward_calls) and bool(played.backward_calls[-1].inputs)
    if op is None and is_inner and evidence.incident.optimizers:
        try:
            step = from_stack(evidence.frames[-1].live, evidence.agent, include_failing=True, outwards=1)
        except CannotCut:
            return None
        scope = Microscope(deadline=evidence.deadline)
        op = inner_update(step.runner.play(scope), scope)
    return (step, op.spot) if step is not None and op is not None and op.spot is not None else None


def _loss(step: Step, factor: float) -> float | None:
    """The loss with a multiple of every inner update; None where the step does not come to its loss."""
    played = step.runner.play(damped(factor))
    roots = [root for root in played.roots if root.numel() == 1]
    if not roots or (played.error is not None and not played.backward_calls):
        return None
    return float(roots[-1].detach().item())
