"""The queue of a device, asked what can be asked without waiting for it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

_CYCLES_PER_SECOND = 2e9  # about: a delay may be longer or shorter than was asked for


class Queue(Protocol):
    """What the watch over waits needs of a device; tests stand in for it."""

    def is_usable(self) -> bool:
        """Whether there is a device, and measuring on it disturbs nothing."""

    def is_busy(self) -> bool:
        """Whether the device still has work in its queue."""

    def mark(self) -> Any:
        """Have the device note the time when it reaches this point."""

    def is_reached(self, mark: Any) -> bool:
        """Whether the device has reached a mark."""

    def between(self, first: Any, second: Any) -> float:
        """Seconds from one mark to another; both must have been reached."""

    def delay(self, seconds: float) -> None:
        """Have the device do nothing for about this long, before it goes on."""


class CudaQueue:
    """The current stream of the current CUDA device."""

    def is_usable(self) -> bool:
        if not torch.cuda.is_initialized() or not hasattr(torch.cuda, "_sleep"):
            return False
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return False  # other ranks would wait for this one
        return not torch.cuda.is_current_stream_capturing()

    def is_busy(self) -> bool:
        return not torch.cuda.current_stream().query()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_reached(self, mark: Any) -> bool:
        return bool(mark.query())

    def between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3

    def delay(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))
