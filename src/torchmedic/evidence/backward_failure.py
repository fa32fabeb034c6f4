"""An exception that ended a step, in backward or elsewhere: what backward was called on, the step to replay."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator

import torch
from torch._C._autograd import _get_sequence_nr

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.replay.step.step import Step, from_traceback
from torchmedic.source.live_frames import Frame
from torchmedic.source.segment.cut import CannotCut

_TIME_LIMIT_SECONDS = 120.0
_MAX_LOOPS_OUT = 2


class BackwardFailure:
    """The replayable side of a `RaisedEvidence` whose exception passed through backward.

    `replay` fills `step`, `faithful` and `why_not`; the constructor only stores what is known.
    """

    def __init__(self, evidence: RaisedEvidence) -> None:
        self.evidence = evidence
        self.deadline = time.monotonic() + _TIME_LIMIT_SECONDS
        self.step: Step | None = None  # the step for trials
        self.faithful = False  # its replayed loss is the original one, bit for bit
        self.why_not = ""  # why there is no step
        self._is_replayed = False
        self.sequence_number = _get_sequence_nr()  # nodes with higher ones were made by replays

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

    def replay(self) -> Step | None:
        """Cut the step and replay it once, in the way that repeats it best; None if it cannot be cut."""
        if not self._is_replayed:
            self._is_replayed = True
            try:
                self.step = self._cut(0)
            except CannotCut as reason:
                self.why_not = str(reason)
            else:
                self.faithful = self.step.settle(self.roots)
        return self.step

    def widen(self) -> Iterator[Step]:
        """Replay the step and yield it, and then more of what happened before it: one loop further out each time.

        What went wrong in an earlier turn of the innermost loop does not show in a replay of the last turn alone. The
        step that the caller stops at is the one for trials.
        """
        step = self.replay()
        if step is not None:
            yield step
        for outwards in range(1, _MAX_LOOPS_OUT + 1):
            try:
                wider = self._cut(outwards)
            except CannotCut:
                return
            self.step = wider
            self.faithful = False
            yield wider

    def _cut(self, outwards: int) -> Step:
        return from_traceback(
            self.evidence.error.__traceback__,
            self.evidence.incident.process,
            within=self.engine.live if self.engine is not None else None,
            outwards=outwards,
        )


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
        with contextlib.suppress(CannotCut):
            return self.evidence.step_of_library()
        return None

    def intended_loss(self) -> float | None:
        """The loss that the step would have had if autograd did not object: that of a replay without gradients."""
        if self.step is None:
            return None
        played = self.step.runner.play(torch.no_grad(), backward=False)
        if played.error is not None or not played.roots or played.roots[-1].numel() != 1:
            return None
        return float(played.roots[-1].item())
