"""The threads that train: those that have called backward.

A replay changes weights, gradients and random numbers and puts them back. What another thread computes meanwhile would
be wrong, and what it has learned would be put back as well. So nothing is replayed while another thread trains.
"""

from __future__ import annotations

import concurrent.futures.thread
import queue
import selectors
import sys
import threading
from types import FrameType

THREADS: set[int] = set()  # their identities; the hook of backward adds to them

# Whoever stands in one of these waits for somebody, as the main thread does for a thread that it has started.
_WAITING = frozenset({threading.__file__, queue.__file__, selectors.__file__, concurrent.futures.thread.__file__})


def is_started(thread: int) -> bool:
    """Whether Python has started a thread, as opposed to those of autograd, which work for a thread that waits."""
    known = threading._active.get(thread)  # type: ignore[attr-defined]
    return known is not None and not isinstance(known, threading._DummyThread)


def others_train() -> bool:
    """Whether another thread that has trained is at work, as far as its stack tells."""
    own = threading.get_ident()
    others = THREADS - {own}
    if not others or not is_started(own):
        return False
    frames: dict[int, FrameType] = sys._current_frames()
    at_work = (frame for each in others if (frame := frames.get(each)) is not None)
    return any(frame.f_code.co_filename not in _WAITING for frame in at_work)
