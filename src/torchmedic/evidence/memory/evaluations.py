"""An evaluation that records for a backward which never comes."""

from __future__ import annotations

from typing import NamedTuple

from torchmedic.evidence.memory.attempts import callers_of
from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.evidence.memory.source.differentiated import is_differentiated, source_goes_backward
from torchmedic.source.live_frames import Frame

_MIN_SAVED_SHARE = 0.3  # of all tensors


class Evaluation(NamedTuple):
    """The call of the model, the bytes saved for backward, and whether the model was told that it is no training."""

    call: Frame
    saved: int
    is_declared: bool


def evaluation_of(autopsy: Autopsy) -> Evaluation | None:
    """The evaluation that memory ran out in, where much of it is kept for a backward that does not follow."""
    evidence = autopsy.evidence
    if autopsy.in_backward or autopsy.in_optimizer or not autopsy.builds_graph:
        return None
    callers = callers_of(evidence)
    root = next((frame.module for frame in evidence.frames if frame.module is not None), None)
    if root is None or not callers or not any(each.requires_grad for each in root.parameters()):
        return None
    is_declared = not any(child.training for child in root.modules())
    saved = sum(line.nbytes for line in autopsy.saved_lines)
    if saved < _MIN_SAVED_SHARE * autopsy.book.everything or saved < (autopsy.asked or 0) // 2:
        return None
    if not (is_declared or _is_trained_elsewhere(autopsy)) or is_differentiated(callers):
        return None
    return Evaluation(callers[-1], saved, is_declared)


def _is_trained_elsewhere(autopsy: Autopsy) -> bool:
    """Whether what trains is not this, or nothing does."""
    updated = autopsy.agent is not None and autopsy.agent.clock.updates > 0
    return updated or not source_goes_backward()
