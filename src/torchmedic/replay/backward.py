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
        """torch's own frame that entered the engine: the outermost, as a checkpoint enters it again from inside."""
        return next((frame for frame in self.evidence.frames if frame.function == "_engine_run_backward"), None)

    @property
    def roots(self) -> list[torch.Tensor]:
        """The tensors that backward was called on."""
        if self.engine is None:
            return []
        given = self.engine.variables.get("t_outputs", ())
        return [tensor for tensor in given if isinstance(tensor, torch.Tensor)]

    @property
    def loss(self) -> float | None:
        """The loss that backward was called on, if it is one number."""
        roots = [root.detach() for root in self.roots]
        return float(roots[0].item()) if len(roots) == 1 and roots[0].numel() == 1 else None

    @property
    def caller(self) -> Frame | None:
        """The user's frame that called backward; frames below it are of custom Functions and hooks."""
        frames = self.evidence.frames
        stop = frames.index(self.engine) if self.engine is not None else len(frames)
        return next((frame for frame in reversed(frames[:stop]) if frame.is_user), self.evidence.user_frame)

    @functools.cached_property
    def step(self) -> Step | None:
        try:
            step = from_traceback(
                self.evidence.error.__traceback__,
                self.evidence.incident.agent,
                within=self.engine.live if self.engine is not None else None,
            )
        except CannotCut as reason:
            self.why_not = str(reason)
            return None
        self.faithful = step.settle(self.roots)
        return step
