"""Which line of the user's started CUDA in this process: noted once, when it happens; a forked child knows it too."""

from __future__ import annotations

import contextlib
import sys

import torch

from torchmedic.contained import contained
from torchmedic.records import StackFrame
from torchmedic.source.user_code import user_frame

_started: list[StackFrame] = []


def install() -> None:
    """Torch itself calls back, once, when it starts CUDA."""
    with contextlib.suppress(Exception):
        if not torch.cuda.is_initialized():
            torch.cuda._lazy_call(_note)


@contained("observe.cuda_start")
def _note() -> None:
    frame = user_frame(sys._getframe(1))
    if frame is not None:
        _started.append(StackFrame(file=frame.f_code.co_filename, line=frame.f_lineno, function=frame.f_code.co_name))


def started() -> StackFrame | None:
    """The user's line that started CUDA, or None."""
    return _started[0] if _started else None
