"""What surrounds every replay, so that nothing it does outlives it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torchmedic.replay.isolation.outside_world import reading_refused, sealed
from torchmedic.replay.isolation.python_state import python_left_alone


@contextlib.contextmanager
def harmless(frame: FrameType, *, thorough: bool = False) -> Iterator[None]:
    """Keep the block from the world outside, and put back what it changes in Python.

    Raises:
        TooMuchInReach: Not everything can be put back; only if `thorough`.
    """
    with contextlib.suppress(Exception):
        __import__("torch._dynamo")  # else a replay would load it, and find our answers
    with signals_deferred(), python_left_alone(frame, thorough=thorough) as one_way, sealed(), reading_refused(one_way):
        yield


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold back signals that have a handler in Python until the block is over.

    A handler may save the weights, or raise to end the training. In a replay nothing would be saved, and what the
    handler raised would be taken for the end of the replay. The interrupt key ends the replay as it ends all else.
    """
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
