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


def others_train() -> bool:
    """Whether another thread that has trained is at work, as far as its stack tells."""
    frames: dict[int, FrameType] = sys._current_frames() if len(THREADS) > 1 else {}
    others = (frames.get(each) for each in THREADS - {threading.get_ident()})
    return any(frame is not None and frame.f_code.co_filename not in _WAITING for frame in others)
