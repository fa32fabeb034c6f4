"""A step of compiled code, run again without the compiler, in a run that is most likely healthy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import FrameType

import torch

from torchmedic.observe.context import ProcessContext
from torchmedic.replay.isolation.python_state import TooMuchInReach
from torchmedic.replay.step.step import from_stack
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.spots import user_spots

_MIN_ROOM = 4  # free memory of a card, as a multiple of the most that was allocated
_MAX_SECONDS_IN_REACH = 1.0  # to note all that the replay could change


def _has_room() -> bool:
    """Whether the card has several times as much free memory as the run has ever used."""
    if torch.cuda.is_current_stream_capturing():
        return False
    return torch.cuda.mem_get_info()[0] > _MIN_ROOM * torch.cuda.max_memory_allocated()


def run_eagerly(
    frame: FrameType, context: AbstractContextManager[None], agent: ProcessContext
) -> Sequence[torch.Tensor]:
    """Run the step of compiled code up to its backward again, without the compiler.

    Args:
        frame: Of the call of backward.
        context: Entered around the step.
        agent: What was noted of the step.

    Returns:
        What backward would be called on, with its graph; nothing where the step cannot be run again with certainty
        that all is put back, or has parts in other processes.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return ()
    if torch.cuda.is_initialized() and not _has_room():
        return ()  # a step run again takes memory of the card, which the run may need
    try:
        step = from_stack(frame, agent, include_failing=True)
        step.runner.thorough = _MAX_SECONDS_IN_REACH
        played = step.runner.play(context, backward=False)
    except (CannotCut, TooMuchInReach):
        return ()
    line = [(spot.file, spot.line) for spot in user_spots(frame)[:1]]  # a replay may call backward on others as well
    calls = [call for call in played.backward_calls if [(spot.file, spot.line) for spot in call.stack[:1]] == line]
    return calls[-1].roots if played.error is None and calls else ()
