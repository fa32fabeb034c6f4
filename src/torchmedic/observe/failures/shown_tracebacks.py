"""Tracebacks as the user would see them without torchmedic: no frame of ours, and from the outermost frame on."""

from __future__ import annotations

import os
from types import TracebackType

from torchmedic.observe.failures.hostile_exceptions import next_in_chain, set_traceback, traceback_of
from torchmedic.source.user_code import PACKAGE

_DEMOS = os.path.join(PACKAGE, "demos") + os.sep
_MAX_CALLERS = 200


def without_our_frames(error: BaseException) -> None:
    """Take the frames of our patches out of a traceback, so that it reads as it would have without us."""
    chain: BaseException | None = error
    for _ in range(50):
        if chain is None:
            return
        set_traceback(chain, _strip(traceback_of(chain)))
        chain = next_in_chain(chain)


def _strip(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and _is_ours(tb):
        tb = tb.tb_next
    head = tb
    while tb is not None:
        following = tb.tb_next
        while following is not None and _is_ours(following):
            following = following.tb_next
        if following is not tb.tb_next:
            tb.tb_next = following
        tb = following
    return head


def _is_ours(tb: TracebackType) -> bool:
    filename = tb.tb_frame.f_code.co_filename
    return filename.startswith(PACKAGE) and not filename.startswith(_DEMOS)


def with_callers(tb: TracebackType | None) -> TracebackType | None:
    """A traceback that begins at the outermost frame, as it would at the end of the script."""
    frame = tb.tb_frame.f_back if tb is not None else None
    for _ in range(_MAX_CALLERS):
        if frame is None:
            break
        tb = TracebackType(tb, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return tb
