"""What surrounds every replay, so that nothing it does outlives it.

A replay ends in time, and before it makes an out-of-memory of its own.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchmedic.observe.device.hidden_work import seen_by_subclasses, with_default_device
from torchmedic.replay.isolation.endings import ending_inside
from torchmedic.replay.isolation.outside_world import exchanges, reading_refused, refuse_exchange, sealed
from torchmedic.replay.isolation.python_state import Walk, python_left_alone

_MAX_SECONDS = 120.0  # of a replay, however long a step usually takes
_MIN_SECONDS = 15.0
WALL_FACTOR = 4.0  # how many times longer than its own time a replay may take, while others have the processor
_MAX_STEPS = 20  # usual steps that a replay may take
GRACE = 2.0  # seconds between the end at an operation, which is the gentler one, and the end wherever it is
_MIN_FREE_HOST = 0.03  # share of the host's memory that stays free
_MIN_FREE_DEVICE = 0.02  # share of the device's memory that stays free
_COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional")
_OPERATIONS_PER_LOOK = 64  # at memory


@contextlib.contextmanager
def harmless(frame: FrameType, *, thorough: float = 0.0) -> Iterator[Walk]:
    """Keep the block from the world outside, and put back what it changes in Python.

    Yields:
        What was noted, to be put back.

    Raises:
        TooMuchInReach: Not everything can be put back; only if `thorough`.
    """
    with contextlib.suppress(Exception):
        __import__("torch._dynamo")  # else a replay would load it, and find our answers
    with (
        signals_deferred(),
        python_left_alone(frame, thorough=thorough) as noted,
        sealed(),
        reading_refused(noted.one_way),
        with_default_device(),
        seen_by_subclasses(),
        ending_inside(),
    ):
        yield noted


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


class ReplayTooLong(Exception):
    """The replay has used up its time."""

    def __init__(self) -> None:
        super().__init__("it took too long")


class ReplayWaits(ReplayTooLong):
    """The replay waits for what does not come a second time: a lock that the step holds, an item that it has taken."""

    def __init__(self) -> None:
        Exception.__init__(self, "it waits for something that does not come again")


class ReplayTooBig(Exception):
    """The replay was about to use up the memory."""

    def __init__(self) -> None:
        super().__init__("there is not enough memory to run the step once more")


SHADOW_LIMIT = 6.0  # seconds that one replay on the CPU may take, of a step that a device ran


def time_limit(usual_step: float) -> float:
    """How many seconds a replay may take, given what a step usually takes."""
    return min(_MAX_SECONDS, max(_MIN_SECONDS, _MAX_STEPS * usual_step))


def check_memory() -> None:
    """Raise `ReplayTooBig` before memory runs out, on the host or on the current CUDA device."""
    memory = psutil.virtual_memory()
    if memory.available < _MIN_FREE_HOST * memory.total:
        raise ReplayTooBig
    if torch.cuda.is_initialized():
        try:
            free, total = torch.cuda.mem_get_info()
        except RuntimeError:
            return  # the device is lost: what is run now is run on the host
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if free + cached < _MIN_FREE_DEVICE * total:
            raise ReplayTooBig


class Bounds(TorchDispatchMode):
    """Looks at the clock of this thread at every operation, and at memory now and then."""

    def __init__(self, seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._end = time.thread_time() + seconds
        self._deadline = time.monotonic() + WALL_FACTOR * seconds
        self._count = 0
        self._exchanges = exchanges()

    @property
    def met_collective(self) -> bool:
        """Whether the step wanted to exchange something with other ranks."""
        return exchanges() > self._exchanges

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.thread_time() > self._end or time.monotonic() > self._deadline:
            raise ReplayTooLong
        if func.namespace in _COLLECTIVE and torch.distributed.get_world_size() > 1:
            refuse_exchange()
        if self._count % _OPERATIONS_PER_LOOK == 0:
            check_memory()
        self._count += 1
        return func(*args, **(kwargs or {}))
