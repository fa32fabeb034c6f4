"""Signals that come in the middle of a replay: the user's handlers have them as soon as it is over.

A handler may save the weights, or raise to end the training. In a replay nothing would be saved, and what it raised
would be taken for the end of the replay.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold back what has a handler in Python, but for the interrupt key, which ends the replay as it ends all else."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    handlers: dict[signal.Signals, Callable[..., Any]] = {}
    arrived: dict[int, None] = {}

    def note(number: int, frame: FrameType | None) -> None:
        arrived[number] = None

    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, note)
                handlers[number] = handler
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for come in arrived:
            signal.raise_signal(come)
