"""What the rules on numbers have in common: the wording around the place where a bad value was born."""

from __future__ import annotations

import torch

from torchmedic.diagnose.rule import Draft
from torchmedic.replay.numbers import NumbersEvidence


def draft_at_birth(evidence: NumbersEvidence, code: str, name: str, event: str, why: str) -> Draft:
    """Begin a diagnosis at the line where the bad value was born."""
    birth = evidence.birth
    assert birth is not None
    victim = "the loss" if evidence.incident.what == "loss" else "the gradients"
    became = "NaN" if birth.kind == "nan" or birth.spoiled is not None else "infinite"
    draft = Draft(code, name, "proven", f"{event} made {victim} {became}", why)
    spot = evidence.spot
    if spot is not None:
        first = f"first non-finite value, step {evidence.incident.step}"
        draft.at(spot.location("cause", f"{why}: {first}"))
    if birth.spoiled is not None and evidence.scope is not None:
        later = evidence.scope.spot_of(birth.spoiled)
        if later is not None:
            draft.at(later.location("surfaced", "the infinity becomes NaN here"))
    draft.because("replayed on the failing step: the value was finite before this operation and not after it")
    return draft


def rows(mask: torch.Tensor, evidence: NumbersEvidence) -> str:
    """Which rows of the batch a condition holds for, with their dataset items where those are known."""
    if mask.dim() == 0:
        return ""
    hit = mask.reshape(mask.shape[0], -1).any(1).nonzero().flatten().tolist()
    if not hit:
        return ""
    shown = ", ".join(map(str, hit[:5])) + (", ..." if len(hit) > 5 else "")
    text = f"in row{'s' if len(hit) > 1 else ''} {shown} of {mask.shape[0]}"
    items = evidence.incident.batch_indices
    if len(items) == mask.shape[0]:
        text += f" (dataset item{'s' if len(hit) > 1 else ''} {', '.join(str(items[row]) for row in hit[:5])})"
    return text
