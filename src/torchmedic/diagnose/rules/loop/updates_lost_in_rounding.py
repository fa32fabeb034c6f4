"""The updates are too small to change the weights in their dtype.

What: nearly all sampled weights have a gradient and are bit for bit what they were many updates ago.

Why: a number of the dtype has neighbours, and the distance to the next one grows with the number: for `bfloat16` it is
1/128 of the number at most, for `float16` 1/1024, for `float32` 1/8388608. An update that is smaller than half of that
distance is rounded away. So weights in `bfloat16` with a learning rate that suits `float32` do not move: most updates
are lost, and the run learns nothing. No error is raised.

Cure: keep the weights in `float32` and compute in `bfloat16` with `torch.autocast`; or use a larger learning rate.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import UpdatesLost
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence
from torchmedic.source.lookup.named_numbers import ANY, set_and_used


@loop_rule("TM626", "updates-lost-in-rounding", UpdatesLost)
def check(evidence: LoopEvidence, incident: UpdatesLost) -> Draft | None:
    updates = count(incident.updates, "update")
    draft = check.draft(evidence, "proven")
    if incident.clipped_to == 0:
        return _clipped_to_nothing(evidence, incident, draft)
    draft.message = f"the weights do not change: the updates are too small for their dtype, {incident.dtype}"
    made = f"with a learning rate of {incident.rate:g}"
    label = f"holds weights in {incident.dtype}, with a rate of {incident.rate:g}"
    if incident.clipped_to is not None:
        made = f"with gradients that are clipped to a norm of {incident.clipped_to:g}"
        label = f"leaves gradients with a norm of {incident.clipped_to:g}"
    draft.cause = f"{made}, the updates are smaller than the distance between two numbers"
    if incident.change:
        draft.message = (
            f"the weights hardly change: an update moves none of them by more than {incident.change:.1e} of their size"
        )
        draft.cause = f"{made}, the updates are next to nothing"
    cause, bound = evidence.at("cause", incident.cause, label), incident.clipped_to
    draft.at(*(set_and_used(bound, cause, "the bound of the norm", ANY) if bound is not None else (cause,)))
    draft.at(
        evidence.at(
            "surfaced", incident.update, "changes next to nothing" if incident.change else "is rounded away", "step"
        )
    )
    still = incident.graded - incident.moved
    draft.because(
        f"at that pace, {1 / incident.change:.1e} updates would change the weights as a whole"
        if incident.change
        else f"{still} of {count(incident.graded, 'sampled weight')} with a gradient are bit for bit what they were "
        f"{updates} ago",
    )
    if incident.clipped_to is not None:
        cure = "clip to a larger norm"
    elif incident.dtype in ("bfloat16", "float16"):
        cure = f"keep the weights in float32, and compute in {incident.dtype} with `torch.autocast`"
    else:
        cure = "use a larger learning rate"
    draft.help(cure, safety="changes-training")
    return draft.rated("warning")


def _clipped_to_nothing(evidence: LoopEvidence, incident: UpdatesLost, draft: Draft) -> Draft:
    draft.message = "nothing is learned: all gradients are clipped to 0"
    draft.cause = "clipping to a norm of 0 multiplies every gradient by 0"
    draft.at(
        evidence.at("cause", incident.cause, "clips to a norm of 0"),
        evidence.at("surfaced", incident.update, "has only gradients of 0", "step"),
    )
    draft.because(f"the last {count(incident.updates, 'update')} came after such a call, and all gradients are 0")
    draft.help("clip to a norm above 0, or leave the call out if 0 means that nothing is clipped")
    return draft.rated("warning")
