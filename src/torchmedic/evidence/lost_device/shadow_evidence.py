"""What a step's shadow raised, as evidence: with the frames that the user's own code would have shown for it."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.observe.step.tensors import tensors_in
from torchmedic.replay.step.step import Step
from torchmedic.source.live_frames import Frame

if TYPE_CHECKING:
    from torchmedic.evidence.lost_device.evidence import LostDevice

# Who stands between the user's code and an operation while modes are active.
_IN_BETWEEN = (
    "torchmedic.replay",
    "torchmedic.evidence",
    "torch._ops",
    "torch._compile",
    "torch._dynamo",
    "torch.overrides",
    "torch.utils._device",
    "torch.utils._python_dispatch",
)


class ShadowEvidence(RaisedEvidence):
    """The exception of a shadow, with the frames that the user's own code would have shown for it."""

    def __init__(self, lost: LostDevice) -> None:
        assert lost.played is not None
        assert lost.played.error is not None
        self.lost = lost
        batch = lost.batch
        super().__init__(
            msgspec.structs.replace(
                lost.incident.with_error(lost.played.error),
                batch=() if batch is None else tuple(tensors_in(batch.whole)),
                batch_indices=() if batch is None or batch.indices is None else tuple(batch.indices),
            )
        )
        self.frames = _as_in_the_run(self.frames, lost)

    def failing_step(self) -> Step:
        assert self.lost.step is not None
        return self.lost.step

    def step_through_backward(self) -> Step:
        return self.failing_step()


def _as_in_the_run(frames: list[Frame], lost: LostDevice) -> list[Frame]:
    """Frames of ours are left out, and the frame that the segment was cut from is itself again."""
    assert lost.step is not None
    original, file = lost.step.frame, lost.step.segment.file
    kept: list[Frame] = []
    for frame in frames:
        if not kept:
            if frame.file == file and frame.function == "<module>":
                kept.append(ReplayedFrame(frame, original))
        elif frame.function == "handle_torch_function":
            kept.pop()  # of the two calls of the same function, the one that asked to be overridden
        elif not str(frame.live.f_globals.get("__name__", "")).startswith(_IN_BETWEEN):
            kept.append(frame)
    outer: list[Frame] = []
    above = original.f_back
    while above is not None:
        outer.append(Frame(above, above.f_lasti, above.f_lineno))
        above = above.f_back
    return [*reversed(outer), *kept]


class ReplayedFrame(Frame):
    """A frame of a replay that stands for the one that it was cut from: that one's function, the replay's variables."""

    def __init__(self, replayed: Frame, original: FrameType) -> None:
        super().__init__(replayed.live, replayed._lasti, replayed.line)
        self._names = replayed.live.f_locals
        self._code = replayed.instruction
        self.live = original
        self.function = original.f_code.co_name

    @property
    def variables(self) -> dict[str, Any]:
        return self._names

    @property
    def instruction(self) -> str:
        return self._code
