"""Parameters that were unfrozen during training never get a gradient.

What: the parameters were unfrozen (`requires_grad = True`), or given to an optimizer, in the middle of the training.
Since then no backward has reached them, so they do not change.

Why: the part of the model that was frozen still runs under `torch.no_grad()`, which was correct before.

Cure: run this part with gradients from then on: `with torch.set_grad_enabled(self.trains_body):`.
"""

from __future__ import annotations

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp


@rule("TM642", "thawed-without-gradient")
def check(evidence: CheckUp) -> Draft | None:
    unreached = evidence.unreached
    if unreached is None or not unreached.thawed or unreached.cuts.cuts:
        return None
    lost = [
        tensor
        for found in unreached.missing
        if not found.is_written() and (tensor := found.reference()) is not None and id(tensor) in unreached.thawed
    ]
    if not lost:
        return None
    draft = _draft(evidence, lost)
    calls = [unreached.cuts.call_of(layer) for tensor in lost for _, _, layer in evidence.owners(tensor)]
    without = [called for called in calls if called is not None and called.sites and not called.with_gradient]
    if not without:
        return None  # not used yet, perhaps
    draft.at(evidence.at("cause", without[0].sites, "is called with gradients switched off"))
    draft.help("call it with gradients once it is to be trained, or leave it out of the optimizer")
    return draft.about(step=unreached.steps).rated("warning")


def _draft(evidence: CheckUp, lost: list[torch.Tensor]) -> Draft:
    names = [name for tensor in lost if (name := evidence.name_of(tensor))]
    shown = ", ".join(f"`{name}`" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    count = f"{len(lost)} parameters" if len(lost) > 1 else "a parameter"
    draft = check.draft(evidence, "proven")
    draft.message = f"{count} joined the training at a later step, and never got a gradient"
    used = "them runs without gradients, so they get" if len(lost) > 1 else "it runs without gradients, so it gets"
    draft.cause = f"the code that uses {used} none"
    steps = evidence.unreached.steps if evidence.unreached is not None else 0
    return draft.because(f"no gradient in {steps} steps: {shown}" if shown else f"no gradient in {steps} steps")
