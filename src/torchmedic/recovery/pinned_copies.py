"""Copies between a CUDA device and pinned host memory, made on a stream of their own beside the computation.

All copies of a device share one stream, so a pinned buffer can be used again at once: the next copy into it comes after
the last copy out of it. Nothing here waits on the host.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections import deque
from typing import Any

import torch

from torchmedic.observe.memory.host import host_memory

_MAX_BEHIND_BYTES = 256 << 20  # copies that the computation does not wait for yet
_MAX_AHEAD_BYTES = 512 << 20  # copies back that were started before they are needed
_MIN_AHEAD_BYTES = 16 << 20
_TRIAL_BYTES = 32 << 20
_USUAL_SECONDS_PER_BYTE = 4e-11  # over PCIe of the fourth generation
_KEPT_HOST_BYTES = 2 << 30  # that stay available on the host


class PinnedCopies:
    """The copies of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = torch.cuda.Stream(device)
        self._free: dict[int, list[torch.Tensor]] = {}  # buffers by size
        self._free_bytes = 0
        self._used_bytes = 0
        self._behind: deque[tuple[Any, torch.Tensor]] = deque()  # events, and the memory that is being copied
        self._behind_bytes = 0
        self.ahead_bytes = 0
        self._max_ahead_bytes = _MAX_AHEAD_BYTES
        self.seconds_per_byte = self._measured()

    def take(self, storage: torch.UntypedStorage, *, overlapped: bool) -> PinnedCopy:
        """Copy a storage to the host.

        Args:
            storage: Its memory may be freed at once.
            overlapped: Whether the memory is held for a while instead, so that the computation need not wait.

        Raises:
            OSError: The host has no room for it.
        """
        source = as_bytes(storage)
        copy = PinnedCopy(self, self._buffer(storage.nbytes()))
        event = self._on_stream(copy.buffer, source)
        self._behind.append((event, source))
        self._behind_bytes += storage.nbytes()
        self.catch_up(_MAX_BEHIND_BYTES if overlapped else 0)
        return copy

    def catch_up(self, allowed: int = 0) -> None:
        """Let the computation wait for copies to the host until no more bytes than allowed are under way."""
        current = torch.cuda.current_stream(self.device)
        while self._behind_bytes > allowed:
            event, source = self._behind.popleft()
            current.wait_event(event)  # whoever gets this memory next works after the copy
            self._behind_bytes -= source.nbytes

    def put(self, copy: PinnedCopy, storage: torch.UntypedStorage) -> Any:
        """Start a copy back into a storage; returns the event that tells its end."""
        return self._on_stream(as_bytes(storage), copy.buffer)

    def has_room_ahead(self) -> bool:
        return self.ahead_bytes < self._max_ahead_bytes

    def less_ahead(self) -> None:
        """There was no device memory for a copy back that is not needed yet."""
        self._max_ahead_bytes = max(self._max_ahead_bytes // 2, _MIN_AHEAD_BYTES)

    def _measured(self) -> float:
        """The time of a copy to the host, in seconds for a byte."""
        try:
            source = torch.empty(_TRIAL_BYTES, dtype=torch.uint8, device=self.device)
            target = torch.empty(_TRIAL_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in range(2):  # the first copy warms up
                torch.cuda.synchronize(self.device)
                started = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize(self.device)
            return (time.perf_counter() - started) / _TRIAL_BYTES
        except RuntimeError:  # no memory for it now
            return _USUAL_SECONDS_PER_BYTE

    def _on_stream(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def _buffer(self, nbytes: int) -> torch.Tensor:
        free = self._free.get(nbytes)
        self._used_bytes += nbytes
        if free:
            self._free_bytes -= nbytes
            return free.pop()
        if self._free_bytes > self._used_bytes:  # sizes change from step to step
            self._free.clear()
            self._free_bytes = 0
        available = host_memory().available
        if available is not None and available < nbytes + _KEPT_HOST_BYTES:
            self._used_bytes -= nbytes
            raise OSError(errno.ENOMEM, "the host has no memory left for it")
        with contextlib.suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.empty(nbytes, dtype=torch.uint8)  # a limit on pinned memory: slower, and the same values

    def give_back(self, buffer: torch.Tensor) -> None:
        self._used_bytes -= buffer.nbytes
        self._free_bytes += buffer.nbytes
        self._free.setdefault(buffer.nbytes, []).append(buffer)


class PinnedCopy:
    """The bytes of one storage on the host; the buffer goes back to its owner when nobody needs them any more."""

    def __init__(self, copies: PinnedCopies, buffer: torch.Tensor) -> None:
        self.copies = copies
        self.buffer = buffer

    def __del__(self) -> None:
        self.copies.give_back(self.buffer)


class Arrival:
    """A storage that is being filled from the host."""

    def __init__(self, copy: PinnedCopy, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._device = copy.copies.device
        self._event: Any = copy.copies.put(copy, storage)

    def storage(self) -> torch.UntypedStorage:
        """The storage, with whose contents the current stream can work from now on."""
        self._wait()
        return self._storage

    def _wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._event = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be at its end
            self._wait()  # never used: its memory must not be given to others before the copy is over


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
