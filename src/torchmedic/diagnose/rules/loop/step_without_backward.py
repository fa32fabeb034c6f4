"""The optimizer steps again and again with the same gradients, without a `backward()` in between.

What: every update applies gradients that an earlier update has already used, or there are no gradients at all.

Why: `backward()` is outside the loop that steps, under a condition that is no longer true, or forgotten. A library that
calls `backward()` itself, such as Lightning, does not call it where `training_step` returns no loss.

Cure: call `backward()` for every update, and clear the gradients in between.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import StepWithoutBackward
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.records import Role
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.handed_loss import HANDING, silent_steps


@loop_rule("TM605", "step-without-backward", StepWithoutBackward)
def check(evidence: LoopEvidence, incident: StepWithoutBackward) -> Draft | None:
    updates = incident.updates
    draft = check.draft(evidence, "proven")
    if incident.is_first:
        draft.message = "the weights do not change: no gradient is ever computed"
        draft.cause = "the model is run and the optimizer steps, and backward is not called"
        silent = silent_steps() if incident.cause and not list(evidence.calls(incident.cause, "step")) else []
        if len(silent) == 1:  # a library steps
            last = silent[0].function.body[-1]
            draft.at(node_location("cause", silent[0].file, last, f"`{HANDING}` ends here and returns no loss"))
        role: Role = "surfaced" if len(silent) == 1 else "cause"
        draft.at(evidence.at(role, incident.cause, "no backward was called", "step"))
        draft.because(f"{count(updates, 'update')} had no gradient to apply")
        draft.help("call `backward()` on the loss before every step; return the loss where a library does that")
        return draft.rated("warning")
    draft.message = f"the last {updates} updates all used the same gradients: no backward came in between"
    draft.cause = "the gradients are those of an earlier backward, and nothing has computed new ones since"
    draft.at(evidence.at("cause", incident.cause, "steps with gradients that were used already", "step"))
    draft.because("between these updates nothing has written to the gradients, and backward was not called at all")
    draft.help("call backward before every step, and clear the gradients after it", safety="changes-training")
    return draft.rated("warning")
