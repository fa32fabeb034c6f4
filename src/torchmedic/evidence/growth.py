"""What grows inside a single step, with weights that no runaway training has spoiled."""

from __future__ import annotations

from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trace.growth import Growth, growths


def growths_at_start(evidence: NumbersEvidence) -> tuple[list[Growth], bool]:
    """The lines whose values grow geometrically, and whether they did so before training could spoil the weights."""
    if evidence.divergence is not None:
        scope = evidence.divergence.first_step()
        return (growths(scope), True) if scope is not None else ([], True)
    if evidence.scope is None or not evidence.births or evidence.births[0].op is None:
        return [], False
    return growths(evidence.scope), evidence.incident.step == 0
