"""Two calls of the CUDA driver that torch makes only with much around them: a small copy to the host, a mark in it.

Through torch a copy costs seven microseconds of the host and an event as much again; straight to the driver it is
two or three. A step of a small model has some hundred microseconds in all.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class DriverCalls:
    """Copies and marks on the current stream of the current device."""

    def __init__(self) -> None:
        """Raises where there is no such driver: OSError, AttributeError."""
        driver = ctypes.CDLL("libcuda.so.1")
        self._copy = driver.cuMemcpyDtoHAsync_v2
        self._copy.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        self._mark = getattr(driver, "cuStreamWriteValue32_v2", None) or driver.cuStreamWriteValue32
        self._mark.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._stream: Any = torch._C._cuda_getCurrentRawStream
        self._device: Any = torch._C._cuda_getDevice

    def copy(self, host: int, device: int, size: int) -> bool:
        """Have some bytes copied to pinned memory when they are computed; whether the driver took it."""
        return not self._copy(host, device, size, self._stream(self._device()))

    def mark(self, host: int, number: int) -> bool:
        """Have a number stored in pinned memory when all before it is done; whether the driver took it."""
        return not self._mark(self._stream(self._device()), host, number, 0)


def driver_calls() -> DriverCalls | None:
    """The driver's own calls, on cards of NVIDIA's."""
    if torch.version.cuda is None:
        return None
    try:
        return DriverCalls()
    except (OSError, AttributeError):
        return None
