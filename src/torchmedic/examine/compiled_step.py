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

_MAX_SECONDS_IN_REACH = 1.0  # to note all that the replay could change


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
    if torch.cuda.is_initialized():
        return ()  # a step run again takes memory of the card, which the run may need
    try:
        step = from_stack(frame, agent, include_failing=True)
        step.runner.thorough = _MAX_SECONDS_IN_REACH
        played = step.runner.play(context, backward=False)
    except (CannotCut, TooMuchInReach):
        return ()
    return played.backward_calls[-1].roots if played.error is None and played.backward_calls else ()
