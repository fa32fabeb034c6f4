"""Which frames of a stack belong to the step under way."""

from __future__ import annotations

import inspect
import sys
from types import FrameType

from torchmedic.observe.context import StepContext
from torchmedic.source.live_frames import Stack, stack_at
from torchmedic.source.segment.cut import CannotCut
from torchmedic.source.user_code import is_user_file

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Files of those that start processes and look after them: to run such a call again would start them again.
_LAUNCHERS = (
    "torch/distributed/elastic",
    "torch/distributed/run.py",
    "torch/multiprocessing/spawn.py",
    "/subprocess.py",
)


def refuse_launchers(stack: Stack) -> None:
    """Refuse what happened in a launcher. The function of the user's that `mp.spawn` calls is a step like any other."""
    for frame, _, _ in stack:
        name = frame.f_code.co_filename
        if any(part in name for part in _LAUNCHERS):
            raise CannotCut("it happened while processes were started or looked after, not in a training step")
        if is_user_file(name):
            return


def forward_lines(stack: Stack, agent: StepContext) -> dict[FrameType, int]:
    """The line at the forward pass of every frame that was on the stack then; `stack` is innermost first.

    A frame that ended may have left its address to another call of the same function. What is on the stack inside of a
    frame that has gone on to another line since, or that was not on the stack then, has begun later. A frame that has
    caught the exception stands in its handler, and has not gone on. A coroutine outlives the call that resumes it.
    """
    noted, found = agent.notes.forward, {}
    catching = {frame for frame, _, _ in stack_at(sys._getframe())} if sys.exc_info()[1] is not None else set()
    is_later = False
    for frame, line, _ in reversed(stack):
        code, forward = noted.get(id(frame), (None, 0))
        is_noted = code is frame.f_code and (not is_later or bool(frame.f_code.co_flags & _SUSPENDABLE))
        if is_noted:
            found[frame] = forward
        is_later = bool(found) and (not is_noted or (line != forward and frame not in catching))
    return found
