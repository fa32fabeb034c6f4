"""What the rules on numbers have in common: the wording around the place where a bad value was born."""

from __future__ import annotations

import contextlib
import io
import math
import tokenize
from typing import Any

import torch

from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Grade, Location
from torchmedic.replay.trace.microscope import Leaf, Spot, Value
from torchmedic.replay.trace.values import number
from torchmedic.source.lookup.bad_value_makers import maker_of
from torchmedic.source.lookup.origins import Origin
from torchmedic.source.user_code import relative

# Operations that hand their operand on.
PASSING = frozenset("to_copy clone expand contiguous detach lift_fresh alias unsafe_view".split())
_SELECTING = frozenset("index index_select gather select slice take view unsqueeze squeeze".split())


def begin(
    rule: Rule[NumbersEvidence],
    evidence: NumbersEvidence,
    event: str,
    why: str,
    *,
    label: str = "",
    bad: torch.Tensor | None = None,
    spot: Spot | None = None,
    operand: Value | None = None,
    grade: Grade = "proven",
) -> Draft:
    """Begin a diagnosis at the line where the bad value was born.

    Args:
        rule: The rule that makes the diagnosis.
        evidence: With an origin.
        event: What happened, to be followed by "made the loss NaN".
        why: The cause as one plain sentence.
        label: What stands beside the line, shorter than `why` where that is long.
        bad: Which elements are bad, for the rows of the batch.
        spot: The line to blame where that is not the one of the origin.
        operand: The value to blame. Where it was prepared before the step, the line that made it is the cause.
        grade: Lowered where the replay was not bit for bit the same.
    """
    if grade == "proven" and (evidence.faithful is False or evidence.has_stand_ins):
        grade = "likely"
    draft = rule.draft(evidence, grade, f"{event} made {victim(evidence)}", why)
    where = rows(bad, evidence) if bad is not None else ""
    first = f"first non-finite value, step {evidence.incident.step}" + (f", {where}" if where else "")
    text = f"{label or why}: {first}"
    maker = prepared(evidence, operand) if operand is not None else None
    if maker is not None and evidence.spot is not None:
        draft.at(maker.location("cause", f"`{maker.name}` gets its values here"))
        draft.at(evidence.spot.location("surfaced", text))
    else:
        draft.at(spot.location("cause", text) if spot is not None else cause_location(evidence, text))
    birth = evidence.birth
    if spot is None and birth is not None and birth.spoiled is not None and evidence.scope is not None:
        later = evidence.scope.spot_of(birth.spoiled)
        is_backward = birth.spoiled.is_backward
        draft.mark(
            later, "surfaced", f"the infinity becomes NaN {'in the backward of this' if is_backward else 'here'}"
        )
    return draft


def cause_location(evidence: NumbersEvidence, label: str) -> Location | None:
    """The line of the origin; the line where it was noticed where there is none."""
    if evidence.spot is not None:
        return evidence.spot.location("cause", label)
    return evidence.noticed.location("cause", label) if evidence.noticed is not None else None


def victim(evidence: NumbersEvidence) -> str:
    """The victim and its state: `the loss NaN`, `the gradients infinite`."""
    birth = evidence.birth
    if evidence.incident.quantity == "growth":
        return "the loss far too large"
    if evidence.victim_name:
        is_nan = birth is None or birth.kind == "nan" or birth.spoiled is not None
        return f"{evidence.victim_name} " + ("NaN" if is_nan else "infinite")
    if evidence.loss_is_bad:
        loss = evidence.incident.loss
        if loss is None and evidence.played is not None and evidence.played.roots:
            root = evidence.played.roots[-1].detach()
            loss = float(root.item()) if root.numel() == 1 else None
        is_nan = math.isnan(loss) if loss is not None else birth is None or birth.kind == "nan" or bool(birth.spoiled)
        return "the loss " + ("NaN" if is_nan else "infinite")
    gradients = [tensor.grad for tensor in evidence.incident.bad if tensor.grad is not None]
    is_nan = any(bool(gradient.isnan().any()) for gradient in gradients if gradient.layout is torch.strided)
    return "the gradients " + ("NaN" if is_nan else "infinite")


def finish(draft: Draft, evidence: NumbersEvidence) -> Draft:
    """The notes that every diagnosis on numbers ends with."""
    incident = evidence.incident
    if not evidence.loss_is_bad and incident.loss is not None and math.isfinite(incident.loss):
        draft.because(f"the loss itself is finite: {number(incident.loss)}")
    draft.because(evidence.history)
    if evidence.is_redrawn:
        draft.because("the step draws its data from a random generator of its own: it was run with other draws")
    elif evidence.faithful is False and evidence.played is not None:
        roots = [root.detach() for root in evidence.played.roots if root.numel() == 1]
        draft.because(
            f"the replayed loss is {number(float(roots[-1].item()))} where the step had {number(incident.loss)}: "
            "the replay was not the same bit for bit"
        )
    draft.because(noticed(evidence))
    if evidence.complaint and evidence.noticed is not None:
        draft.at(evidence.noticed.location("surfaced", "noticed here"))
    return draft


def noticed_at(evidence: NumbersEvidence) -> str:
    """The place where the bad number was noticed."""
    at = evidence.noticed
    if at is None or evidence.complaint:
        return evidence.complaint
    place = f"{relative(at.file)}:{at.line}"
    text = _without_comment(at.location("surfaced").code)
    return f"noticed at `{text}`, {place}" if len(text) <= 60 else f"noticed at {place}"


def _without_comment(code: str) -> str:
    with contextlib.suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type == tokenize.COMMENT:
                return code[: token.start[1]].rstrip()
    return code


def noticed(evidence: NumbersEvidence) -> str:
    """The place where the bad number was noticed, and what it had reached by then."""
    incident, text = evidence.incident, noticed_at(evidence)
    if evidence.noticed is None or evidence.complaint:
        return text
    if evidence.loss_is_bad and not incident.bad and incident.optimizers:
        return f"{text}; the gradients stayed finite, so the weights are not damaged"
    if not incident.damaged and (incident.stage == "step" or incident.optimizers):
        return f"{text}; the weights were not touched"
    return text


# Rows of the batch


def rows(mask: torch.Tensor, evidence: NumbersEvidence) -> str:
    """Which rows of the batch a condition holds for, with their dataset items where those are known."""
    if mask.dim() == 0 or mask.numel() == 0 or mask.shape[0] == 1:
        return ""
    hit = mask.reshape(mask.shape[0], -1).any(1).nonzero().flatten().tolist()
    if not hit:
        return ""
    total = mask.shape[0]
    sizes = {int(tensor.shape[0]) for tensor in evidence.agent.batches.tensors() if tensor.dim()}
    items = evidence.incident.batch_indices
    if len(items) == 1 and isinstance(items[0], list | tuple):
        items = tuple(items[0])
    kind = "batch row" if total in sizes or total == len(items) else "row"
    if len(hit) == total:
        return f"all {total} {kind}s"
    shown = ", ".join(map(str, hit[:5])) + (", ..." if len(hit) > 5 else "")
    text = f"{kind}{'s' if len(hit) > 1 else ''} {shown}"
    if len(items) == total and None not in items:
        named = ", ".join(str(items[row]) for row in hit[:5]) + (", ..." if len(hit) > 5 else "")
        text += f" (dataset item{'s' if len(hit) > 1 else ''} {named})"
    return text


def not_finite(tensor: Any) -> torch.Tensor | None:
    """Which elements of a float tensor are NaN or infinite."""
    if not isinstance(tensor, torch.Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    return ~torch.isfinite(tensor)


def share(mask: torch.Tensor, one: str, some: str) -> str:
    """`the divisor is exactly 0`, `1 of 8 divisors is exactly 0`, or `2 of 8 divisors are exactly 0`."""
    hit, total = int(mask.sum().item()), mask.numel()
    if total in (1, hit):
        return one
    return f"{hit} of {total} {some.replace(' are ', ' is ', 1) if hit == 1 else some}"


def described(tensor: Any) -> str:
    """A tensor in a few words: dtype, shape, range, and what stands out."""
    if not isinstance(tensor, torch.Tensor):
        return number(tensor) if isinstance(tensor, float | int) else type(tensor).__name__
    text = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if tensor.numel() == 0 or tensor.is_complex() or tensor.dtype is torch.bool:
        return text
    finite = tensor[torch.isfinite(tensor)] if tensor.is_floating_point() else tensor.flatten()
    if finite.numel():
        low, high = finite.min().item(), finite.max().item()
        text += f", {number(low)}" if low == high else f", {number(low)} to {number(high)}"
    for count, what in (
        (int((tensor == 0).sum().item()), "zero"),
        (int(tensor.isnan().sum().item()), "NaN"),
        (int(tensor.isinf().sum().item()), "infinite"),
    ):
        if count and not (what == "zero" and finite.numel() == count):
            text += f", {count} {what}"
    return text


def prepared(evidence: NumbersEvidence, value: Value) -> Origin | None:
    """The statement that made an operand, if it is a tensor from before the step that is no weight and no batch."""
    scope = evidence.scope
    source = scope.source(value) if scope is not None else None
    while isinstance(source, int) and scope is not None:
        op = scope.ops[source]
        if op.is_backward or op.kind not in PASSING | _SELECTING or not op.inputs:
            return None
        source = scope.source(op.inputs[0])
    if not isinstance(source, Leaf) or evidence.name_of(source)[0] not in ("tensor", "buffer"):
        return None
    return maker_of(evidence.frames, source.tensor)
