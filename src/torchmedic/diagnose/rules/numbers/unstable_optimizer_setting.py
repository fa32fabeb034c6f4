"""A setting of the optimizer other than its learning rate makes the updates grow.

What: the last steps were run again from a copy of the weights. As they were, the loss grew until it overflowed; with
one setting of the optimizer at its usual value and nothing else changed, the loss fell. Or the loss has left its level,
and the momentum is 1 or more.

Why: a momentum of 1 or more adds up all gradients for ever. A weight decay that is large against the learning rate
throws the weights from one side of zero to the other. Betas far from the usual ones scale the updates wrongly.

Cure: use the usual value of the setting.
"""

from __future__ import annotations

from typing import Any

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import begin, cure, finish, is_ordinary_rate
from torchmedic.evidence.divergence import Divergence
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trajectory.change import Change
from torchmedic.source.lookup.named_numbers import ANY, set_and_used
from torchmedic.source.lookup.optimizers import built_at, setting_assigned_at


@rule("TM237", "unstable-optimizer-setting")
def check(evidence: NumbersEvidence) -> Draft | None:
    divergence = evidence.divergence
    if divergence is None and evidence.incident.quantity == "growth":
        return _grows_slowly(evidence)
    if divergence is None or not is_ordinary_rate(divergence):
        return None
    for optimizer in divergence.optimizers:
        for name, value, usual in _unusual(optimizer):
            course = divergence.course(Change(f"usual {name}", options={name: usual}, fresh=name != "weight_decay"))
            if course is None or not divergence.turns(course):
                if name == "momentum" and value >= 1:
                    return _never_stable(evidence, divergence, optimizer, value)
                continue
            draft = begin(
                check,
                evidence,
                divergence,
                f"`{name}={value}` of the optimizer is out of range",
                f"with `{name}={value}` the updates make the loss larger; with {usual} {divergence.outcome(course)}",
            )
            _locate(draft, evidence, optimizer, name, value)
            draft.treat(cure(divergence, f"use `{name}={usual}`", [(f"with {name}={usual}", course)]))
            return finish(draft, evidence)
    return None


def _never_stable(evidence: NumbersEvidence, divergence: Divergence, optimizer: Any, momentum: float) -> Draft:
    """A velocity that never gets smaller, where the weights are too far gone for a usual momentum to save them."""
    draft = begin(check, evidence, divergence, *_of_momentum(momentum), grade="likely")
    return _with_usual_momentum(draft, evidence, optimizer, momentum)


def _grows_slowly(evidence: NumbersEvidence) -> Draft | None:
    """A velocity that never gets smaller, where the loss grows too slowly to be seen in a few updates."""
    for optimizer in evidence.incident.optimizers:
        for name, value, _ in _unusual(optimizer):
            if name == "momentum" and value >= 1:
                message, why = _of_momentum(value)
                draft = check.draft(evidence, "likely", f"{message}: the loss has left its level, and grows", why)
                return _with_usual_momentum(draft, evidence, optimizer, value)
    return None


def _of_momentum(momentum: float) -> tuple[str, str]:
    """The message and the cause."""
    why = f"with `momentum={momentum}` the velocity never gets smaller by itself, so the updates grow with time"
    return f"`momentum={momentum}` of the optimizer is out of range", why


def _with_usual_momentum(draft: Draft, evidence: NumbersEvidence, optimizer: Any, momentum: float) -> Draft:
    _locate(draft, evidence, optimizer, "momentum", momentum)
    draft.help("use `momentum=0.9`", safety="changes-training")
    return finish(draft, evidence)


def _unusual(optimizer: Any) -> list[tuple[str, Any, Any]]:
    """The settings that are far from what is usual: name, value, usual value."""
    group = optimizer.param_groups[0]
    found: list[tuple[str, Any, Any]] = []
    momentum = group.get("momentum")
    if isinstance(momentum, int | float) and (momentum >= 0.999 or momentum < 0):
        found.append(("momentum", momentum, 0.9))
    betas = group.get("betas")
    if isinstance(betas, tuple) and len(betas) == 2 and (betas[0] > 0.99 or betas[1] < 0.9):
        found.append(("betas", betas, (0.9, 0.999)))
    decay, rate = group.get("weight_decay"), group.get("lr")
    if isinstance(decay, int | float) and decay > 0.5 and isinstance(rate, int | float) and decay * rate > 0.1:
        found.append(("weight_decay", decay, 0.0))
    if isinstance(decay, int | float) and decay < 0:
        found.append(("weight_decay", decay, 0.0))
    return found


def _locate(draft: Draft, evidence: NumbersEvidence, optimizer: Any, name: str, value: Any) -> None:
    """The construction of the optimizer, or the assignment that changed its setting later."""
    by = evidence.agent.clock.constructions.get(optimizer)
    shown = value if isinstance(value, int | float) else None
    label = f"{name} is {value}"
    is_built = optimizer.defaults.get(name) == value
    cause = None if is_built else setting_assigned_at(evidence.frames, name, "cause", label)
    cause = cause or built_at(evidence.frames, optimizer, "cause", label, by=by, value=shown)
    said = f"the value {value} is written here"
    draft.at(*(set_and_used(shown, cause, said, ANY) if shown is not None else (cause,)))
