"""The update of the optimizer itself made the weights NaN or infinite.

What: the loss and all gradients were finite, but a weight is not finite after `optimizer.step()`.

Why: a learning rate that is infinite or NaN (a schedule that divides by zero), an optimizer with `eps=0` that divides
by a second moment of exactly zero, an `eps` that float16 cannot represent, or an update that exceeds the range of the
dtype.

Cure: check the learning rate and `eps`; keep the weights in float32.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import is_diverging
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Role
from torchmedic.replay.trace.values import number
from torchmedic.source.lookup.optimizers import built_at, rate_set_at


class Reason(NamedTuple):
    event: str
    why: str
    label: str
    help: str


@rule("TM298", "nonfinite-optimizer-update")
def check(evidence: NumbersEvidence) -> Draft | None:
    incident = evidence.incident
    optimizer = incident.stepping
    if optimizer is None:
        return None
    if incident.quantity == "rate":
        return _of_rate(evidence, optimizer)
    if incident.quantity != "update" or is_diverging(evidence):
        return None
    damaged = incident.damaged[0] if incident.damaged else None
    group = next((each for each in optimizer.param_groups if any(tensor is damaged for tensor in each["params"])), None)
    if damaged is None or group is None:
        return None
    reason = _reason(optimizer, group, damaged)
    draft = check.draft(evidence, "proven" if reason is not None else "likely")
    draft.message = (reason.event if reason else "the update of the optimizer") + " made the weights " + _kind(damaged)
    draft.cause = (
        reason.why if reason else "the loss and the gradients were finite, the weights after the update are not"
    )
    kind = type(optimizer).__name__
    label = reason.label if reason else f"learning rate {number(float(group['lr']))}"
    by = evidence.agent.clock.constructions.get(optimizer)
    built = built_at(evidence.frames, optimizer, "cause", label, by=by)
    draft.at(built)
    if evidence.noticed is not None:
        role: Role = "surfaced" if built is not None else "cause"
        draft.at(evidence.noticed.location(role, "the weights were finite before this, and are not after it"))
    bad = int((~torch.isfinite(damaged.detach())).sum().item())
    draft.because(
        f"{bad} of {damaged.numel()} values of a weight {list(damaged.shape)} are not finite after `{kind}.step()`",
        f"its gradient is finite, at most {number(damaged.grad.abs().max().item())}"
        if damaged.grad is not None
        else "",
    )
    return draft.help(
        reason.help if reason else "look at the learning rate, the weight decay and the eps of the optimizer"
    )


def _kind(tensor: torch.Tensor) -> str:
    return "NaN" if bool(tensor.detach().isnan().any()) else "infinite"


def _reason(optimizer: Any, group: dict[str, Any], damaged: torch.Tensor) -> Reason | None:
    state = optimizer.state.get(damaged, {})
    second = next((state[key] for key in ("exp_avg_sq", "square_avg", "sum", "exp_inf") if key in state), None)
    eps, kind = group.get("eps"), type(optimizer).__name__
    bad = ~torch.isfinite(damaged.detach())
    if isinstance(second, torch.Tensor) and isinstance(eps, float) and second.shape == damaged.shape:
        held = float(torch.tensor(eps, dtype=torch.float64).to(damaged.dtype).item())
        zero = second.detach()[bad] == 0
        if held == 0 and bool(zero.any()):
            dtype = str(damaged.dtype).removeprefix("torch.")
            text = "eps is 0" if eps == 0 else f"eps is {eps:g}, which is 0 in {dtype}"
            return Reason(
                f"`{kind}` with an eps of zero",
                f"{text}, and the second moment of {int(zero.sum().item())} weights is exactly 0: it divides by 0",
                text,
                "use an eps above zero"
                if eps == 0
                else "keep the weights in float32, or use a larger eps such as 1e-4",
            )
    rate = float(group["lr"])
    if rate >= 1e6 or (damaged.grad is not None and _overflows(rate, damaged)):
        return Reason(
            "an update that is too large",
            f"learning rate {number(rate)} times the gradient is more than the type of the weights can hold",
            f"the learning rate is {number(rate)}",
            "lower the learning rate",
        )
    return None


def _overflows(rate: float, damaged: torch.Tensor) -> bool:
    assert damaged.grad is not None
    limit = torch.finfo(damaged.dtype).max
    return rate * float(damaged.grad.detach().double().abs().max().item()) > limit / 4


def _of_rate(evidence: NumbersEvidence, optimizer: Any) -> Draft:
    incident = evidence.incident
    rate = next(
        group["lr"]
        for group in optimizer.param_groups
        if isinstance(group["lr"], float) and not math.isfinite(group["lr"])
    )
    text = "NaN" if math.isnan(rate) else "infinite"
    draft = check.draft(evidence, "proven")
    draft.message = f"the learning rate is {text} in step {incident.step}"
    draft.cause = f"`{type(optimizer).__name__}` is about to multiply every gradient by {number(rate)}"
    made = rate_set_at(evidence.frames, optimizer, "cause", f"this makes the learning rate {text}")
    draft.at(made)
    draft.mark(evidence.noticed, "surfaced" if made is not None else "cause", "noticed before this update")
    losses = [loss for loss in incident.losses if math.isfinite(loss)]
    draft.because(f"the loss was finite until now: {number(losses[-1])}" if losses else "")
    return draft.help("correct the schedule: a division by zero, a logarithm or a power of the step number")
