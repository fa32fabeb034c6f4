"""An exception that came out of the autograd engine: what backward was called on, and the step to replay."""

from __future__ import annotations

import functools
import time

import torch

from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.frames import Frame
from torchmedic.replay.segment import CannotCut
from torchmedic.replay.step import Step, from_traceback

_TIME_LIMIT = 120.0


class BackwardFailure:
    """The replayable side of a `RaisedEvidence` whose exception passed through backward."""

    def __init__(self, evidence: RaisedEvidence) -> None:
        self.evidence = evidence
        self.deadline = time.monotonic() + _TIME_LIMIT
        self.why_not = ""
        self.faithful = False

    @functools.cached_property
    def engine(self) -> Frame | None:
        """torch's own frame that entered the engine."""
        return next(
            (frame for frame in reversed(self.evidence.frames) if frame.function == "_engine_run_backward"), None
        )

    @property
    def roots(self) -> list[torch.Tensor]:
        """The tensors that backward was called on."""
        if self.engine is None:
            return []
        given = self.engine.variables.get("t_outputs", ())
        return [tensor for tensor in given if isinstance(tensor, torch.Tensor)]

    @property
    def caller(self) -> Frame | None:
        """The user's frame that called backward; frames below it are of custom Functions and hooks."""
        frames = self.evidence.frames
        stop = frames.index(self.engine) if self.engine is not None else len(frames)
        return next((frame for frame in reversed(frames[:stop]) if frame.is_user), self.evidence.user_frame)

    @functools.cached_property
    def step(self) -> Step | None:
        try:
            step = from_traceback(self.evidence.error.__traceback__, self.evidence.incident.agent)
        except CannotCut as reason:
            self.why_not = str(reason)
            return None
        self.faithful = step.settle(self.roots)
        return step
