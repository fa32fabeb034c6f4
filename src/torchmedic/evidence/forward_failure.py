"""An exception that ended a step before its backward or after it: the step to try cures on."""

from __future__ import annotations

import functools

import torch

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.step.step import Step
from torchmedic.source.segment.cut import CannotCut


class StepFailure:
    """The replayable side of a `RaisedEvidence` whose exception came from the user's own statements."""

    def __init__(self, evidence: RaisedEvidence) -> None:
        self.evidence = evidence
        self.why_not = ""

    @functools.cached_property
    def step(self) -> Step | None:
        try:
            return self.evidence.step_through_backward()
        except CannotCut as reason:
            self.why_not = str(reason)
            return None

    def intended_loss(self) -> float | None:
        """The loss that the step would have had if autograd did not object: that of a replay without gradients."""
        if self.step is None:
            return None
        played = self.step.runner.play(torch.no_grad(), backward=False)
        if played.error is not None or not played.roots or played.roots[-1].numel() != 1:
            return None
        return float(played.roots[-1].item())
