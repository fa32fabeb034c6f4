"""A statement of the training code computes new values and throws them away, so it has no effect.

What: an operation that returns a new tensor (`ids.masked_fill(...)`, `torch.clamp(p, ...)`) stands alone, and nothing
takes its result. Or the variable of a loop over parameters is assigned (`p = p.clamp(-c, c)`), and nothing reads it.

Why: operations of torch without a trailing underscore leave their operands as they are. An assignment to a variable
gives the name another value; the parameter that the name stood for stays as it is. So weights are not clipped, a target
network does not follow, a mask hides nothing. No error is raised.

Cure: assign the result (`ids = ids.masked_fill(...)`), or write into the tensor (`p.data.clamp_(-c, c)`).
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import ResultThrownAway
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM652", "result-thrown-away", ResultThrownAway)
def check(evidence: LoopEvidence, incident: ResultThrownAway) -> Draft | None:
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
