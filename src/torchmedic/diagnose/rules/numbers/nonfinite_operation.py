"""An operation turned finite numbers into NaN or infinity.

What: this is the first operation of the step with finite operands and a result that is not finite. The diagnosis lists
the operands.

Why: there is no rule for this operation. Most often the result is too large for its dtype, or the operation is not
defined for one of the values.

Cure: check the operands; bound, scale or select them before the operation.
"""

from __future__ import annotations

import math

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers import unscaled_data
from torchmedic.diagnose.rules.numbers._courses import is_diverging
from torchmedic.diagnose.rules.numbers._slopes import in_double
from torchmedic.diagnose.rules.numbers._wording import begin, cause_location, described, finish, not_finite, victim
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trace.microscope import Captured, Op
from torchmedic.replay.trace.values import number
from torchmedic.source.lookup.bad_value_makers import is_next_state


@rule("TM299", "nonfinite-operation")
def check(evidence: NumbersEvidence) -> Draft | None:
    op, captured = evidence.op, evidence.replay_with_values(evidence.op)
    if op is None:
        return _without_origin(evidence)
    if is_diverging(evidence):
        return None
    of_data = unscaled_data.of_step(evidence)
    if of_data is not None:
        return of_data
    forward = evidence.forward_op
    name = op.kind if forward is None or forward is op else f"{forward.kind}"
    if captured is None:
        draft = begin(
            check,
            evidence,
            f"`{name}`",
            f"its result is the first that is not finite; {evidence.why_no_values}, so the operands are not known",
            grade="likely",
        )
        return finish(draft, evidence)
    constants = [part for part in captured.args if isinstance(part, float) and not math.isfinite(part)]
    if constants:
        event, why, label = _constant(name, constants[0])
    elif op.is_uninitialised:
        event = "memory that was never written to"
        why, label = f"`{op.name}` does not initialise its memory, and nothing wrote to it", "not initialised"
    else:
        event, why, label = _finite_in(op, captured, name)
    if op.derived and forward is not op:
        event = f"the gradient of {event}"
    draft = begin(check, evidence, event, why, label=label, bad=not_finite(captured.outputs[0]))
    draft.because(*(f"operand {number}: {described(tensor)}" for number, tensor in enumerate(captured.tensors[:4], 1)))
    if op.derived:
        draft.because(f"made by `{op.name}` in `{op.node}`")
    draft.help("bound, scale or select the operands before this line")
    return finish(draft, evidence)


def _constant(name: str, constant: float) -> tuple[str, str, str]:
    text = "NaN" if math.isnan(constant) else number(constant)
    return f"a constant {text}", f"`{name}` was given the constant {text}", f"the constant {text}"


def _finite_in(op: Op, captured: Captured, name: str) -> tuple[str, str, str]:
    output = captured.outputs[0]
    if output.is_floating_point() and not bool(output.isnan().any()):
        wide = in_double(captured)
        peak = max((tensor.abs().max().item() for tensor in wide or () if tensor.numel()), default=math.nan)
        limit = torch.finfo(output.dtype).max
        dtype = str(output.dtype).removeprefix("torch.")
        if math.isfinite(peak) and peak > limit:
            why = f"`{name}` reaches {number(peak)}, and the largest {dtype} is {number(limit)}"
            return f"overflow of `{name}`", why, f"{number(peak)} is too large for {dtype}"
    kind = "NaN" if bool(output.isnan().any()) else "infinite"
    return f"`{name}`", f"`{name}` turned finite numbers into {kind}", f"{name} is {kind} here"


def _without_origin(evidence: NumbersEvidence) -> Draft:
    """A leaf that no rule knows, or no replay."""
    leaf = evidence.birth.leaf if evidence.birth is not None else None
    is_replaced = leaf is not None and is_next_state(evidence.step, leaf.tensor)
    if leaf is not None and not is_replaced:
        kind, name = evidence.name_of(leaf)
        called = f"`{name}`, a {kind}," if name else f"a {kind}"
        why = f"{called} was not finite before the step began: {described(leaf.tensor)}"
        draft = check.draft(evidence, "likely", f"a value from before the step made {victim(evidence)}", why)
        reader = (
            evidence.scope.ops[leaf.reader].spot if evidence.scope and leaf.reader < len(evidence.scope.ops) else None
        )
        draft.at(
            reader.location("cause", "used here") if reader is not None else cause_location(evidence, "noticed here")
        )
        return finish(draft, evidence)
    why = f"the step could not be traced: {evidence.why_not}" if evidence.why_not else "the origin was not found"
    if is_replaced:
        why = "the step has already replaced the state that it began with, so it cannot be run again"
    draft = check.draft(evidence, "possible", f"an operation that is not known made {victim(evidence)}", why)
    draft.at(cause_location(evidence, f"noticed here, step {evidence.incident.step}"))
    names = _named(evidence)
    draft.because(f"gradients that are not finite: {names}" if names else "")
    return finish(draft, evidence)


def _named(evidence: NumbersEvidence) -> str:
    if evidence.step is None or not evidence.incident.bad:
        return ""
    bad = {id(tensor) for tensor in evidence.incident.bad}
    names = [
        name
        for module in evidence.step.runner.modules
        for name, tensor in module.named_parameters()
        if id(tensor) in bad
    ]
    return ", ".join(f"`{name}`" for name in names[:4]) + (" and more" if len(names) > 4 else "")
