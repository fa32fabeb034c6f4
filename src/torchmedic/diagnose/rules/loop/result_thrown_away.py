"""A statement of the training code computes new values and throws them away, so it has no effect.

What: an operation that returns a new tensor (`ids.masked_fill(...)`, `torch.clamp(p, ...)`) stands alone, and nothing
takes its result. Or the variable of a loop over parameters is assigned (`p = p.clamp(-c, c)`), and nothing reads it.
Or an attribute is set that torch does not read: `p.require_grad = False`, or `requires_grad` on a module. Or gradients
are clipped before `backward()`, or after `step()` and before they are cleared.

Why: operations of torch without a trailing underscore leave their operands as they are. An assignment to a variable
gives the name another value; the parameter that the name stood for stays as it is. So weights are not clipped, a target
network does not follow, a mask hides nothing. Python lets any attribute be set on a parameter and on a module, so what
should be frozen is trained. No error is raised.

Cure: assign the result (`ids = ids.masked_fill(...)`), or write into the tensor (`p.data.clamp_(-c, c)`). Freeze a part
of a model with `part.requires_grad_(False)`. Clip gradients between `backward()` and `step()`.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import ClipWithoutEffect, FreezeWithoutEffect, ResultThrownAway
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@rule("TM652", "result-thrown-away")
def check(evidence: LoopEvidence) -> Draft | None:
    match evidence.incident:
        case ResultThrownAway() as incident:
            return _result(evidence, incident)
        case FreezeWithoutEffect() as freeze:
            return _freeze(evidence, freeze)
        case ClipWithoutEffect() as clip:
            return _clip(evidence, clip)
    return None


def _result(evidence: LoopEvidence, incident: ResultThrownAway) -> Draft:
    draft = check.draft(evidence, "likely")
    what = incident.what
    draft.message = "this line changes nothing: its result is thrown away"
    if incident.is_rebound:
        draft.cause = f"`{what}` gets another value, and the parameter that it stood for stays as it is"
        draft.at(evidence.at("cause", incident.cause, "nothing reads this value"))
        draft.because(f"the loop sets `{what}` anew in each turn, and no statement reads it after this line")
        draft.help(f"write into the parameter, under `torch.no_grad()`: `{what}.copy_(...)`", safety="changes-training")
    else:
        draft.cause = f"`{what}` returns a new tensor and leaves its operand as it is"
        draft.at(evidence.at("cause", incident.cause, "nothing takes the result"))
        draft.because(f"`{what}` has no trailing underscore, and the statement is the call alone")
        draft.help(f"assign the result, or call `{what}_`", safety="changes-training")
    return draft.rated("warning")


def _freeze(evidence: LoopEvidence, incident: FreezeWithoutEffect) -> Draft:
    draft = check.draft(evidence, "proven")
    what, kind = incident.what, "module" if incident.is_module else "parameter"
    draft.message = f"this line freezes nothing: torch does not read `{what}` of a {kind}"
    kept = "its parameters stay as they are" if incident.is_module else "`requires_grad` stays True"
    draft.cause = f"the line gives `{incident.owner}` an attribute that nobody reads; {kept}"
    draft.at(evidence.at("cause", incident.cause, "sets an attribute without effect"))
    trained = count(incident.still_trained, "parameter")
    draft.because(f"{trained} of the optimizer with a gradient, although `{what}` is False")
    draft.help(f"write `{incident.owner}.requires_grad_(False)`", safety="changes-training")
    return draft.rated("warning")


def _clip(evidence: LoopEvidence, incident: ClipWithoutEffect) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = "this line changes nothing: gradients are clipped "
    if incident.is_late:
        draft.message += "after the update, and then cleared"
        draft.cause = "the update has used the gradients as they were, and the next one gets new ones"
        label = "nobody uses the clipped gradients"
    else:
        draft.message += "before they are computed"
        draft.cause = "the gradients have just been cleared, and those of `backward` are not clipped"
        label = "there are no gradients to clip yet"
    draft.at(evidence.at("cause", incident.cause, label, "clip_grad_norm_", "clip_grad_value_"))
    draft.at(evidence.at("surfaced", incident.update, "uses gradients of any size", "step"))
    draft.because(f"so in each of the last {count(incident.updates, 'update')} that were seen")
    draft.help("clip between `backward()` and `step()`", safety="changes-training")
    return draft.rated("warning")
