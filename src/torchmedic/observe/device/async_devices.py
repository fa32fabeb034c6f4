"""Devices that compute behind the program's back: their values may be looked at only when they are there anyway.

`devices` says which those are and how to ask them. Everything that treats such a device in another way than the CPU
asks this table, so that a device can be entered, or its entry replaced, at one place.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any, ClassVar, Protocol

import torch

from torchmedic.observe.device.driver_calls import DriverCalls, driver_calls

_ARRIVED = 1.0  # the last number of a copy; memory of the host holds 0 there until the copy is complete


def _never_free(value: Any) -> None:
    """Keep an object past the end of the interpreter, which would free it."""
    if sys.implementation.name == "cpython":
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


class LateDevice(Protocol):
    """What torchmedic needs of a kind of device to read its values without waiting for it."""

    def place(self, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Memory of the host for one number, and an event that tells when it has arrived."""

    def arrange(self, host: torch.Tensor, event: Any, value: torch.Tensor) -> None:
        """Have a value copied to its place when it is computed."""

    def places(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        """Memory of the host for several numbers, and an event that tells when they have arrived."""

    def arrange_many(self, host: torch.Tensor, event: Any, values: torch.Tensor) -> None:
        """Have some values copied to the first of several places."""

    def may_work(self) -> bool:
        """Whether copies and events may be issued now."""

    def free_bytes(self, device: torch.device) -> int:
        """Free memory in bytes; asked rarely."""

    def timer(self) -> tuple[Any, Any] | None:
        """Two events with the time between them, to measure a copy by; None where there are none."""

    def when_out_of_memory(self, react: Any) -> None:
        """Register a callback for failed allocations."""


class Cuda:
    """NVIDIA and AMD cards."""

    def __init__(self) -> None:
        self._driver: DriverCalls | None = None
        self._asked_for_driver = False
        self._handed_out: list[torch.Tensor] = []  # never freed: after an error of the device, that ends the process
        _never_free(self._handed_out)

    def place(self, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        if not self._asked_for_driver:
            self._asked_for_driver = True
            self._driver = driver_calls()
        host = self._pinned((), dtype)
        return host, Arrival(host)

    def arrange(self, host: torch.Tensor, event: Any, value: torch.Tensor) -> None:
        arrival: Arrival = event
        arrival.expect()
        here = self._driver is not None and value.get_device() == torch._C._cuda_getDevice()
        if not (here and self._driver.copy(arrival.address, value.data_ptr(), arrival.size)):  # type: ignore[union-attr]
            host.copy_(value if value.dim() == 0 else value.reshape(()), non_blocking=True)

    def places(self, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
        return self._pinned((count,), dtype), None

    def _pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        host = torch.empty(shape, dtype=dtype, pin_memory=True)
        self._handed_out.append(host)
        return host

    def arrange_many(self, host: torch.Tensor, event: Any, values: torch.Tensor) -> None:
        host[: values.numel()].copy_(values, non_blocking=True)

    def may_work(self) -> bool:
        # What is issued during the capture of a graph becomes part of it, and a question may spoil it.
        return not torch._C._cuda_isCurrentStreamCapturing()

    def free_bytes(self, device: torch.device) -> int:
        free, total = torch.cuda.mem_get_info(device)
        share = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        if share is not None and share(device) < 1:
            free = min(free, int(share(device) * total) - torch.cuda.memory_reserved(device))
        return free

    def timer(self) -> tuple[Any, Any] | None:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def when_out_of_memory(self, react: Any) -> None:
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(react)


class Arrival:
    """Tells when a number has come into pinned memory: what stood there before is a NaN that no computation makes.

    An event would say the same, for as much of the host's time as all the rest of a step's hooks.
    """

    _ABSENT: ClassVar[dict[int, tuple[Any, int]]] = {
        2: (ctypes.c_uint16, 0x7FA5),
        4: (ctypes.c_uint32, 0x7FA5A5A5),
        8: (ctypes.c_uint64, 0x7FF5A5A5A5A5A5A5),
    }

    def __init__(self, host: torch.Tensor) -> None:
        self.address = host.data_ptr()
        self.size = host.element_size()
        kind, self._absent = self._ABSENT[self.size]
        self._word = kind.from_address(self.address)
        self._host = host  # the memory is its own

    def expect(self) -> None:
        self._word.value = self._absent

    def query(self) -> bool:
        return bool(self._word.value != self._absent)

    def synchronize(self) -> None:
        """Wait for the number without blocking the device; raises what CUDA raises if the device has died."""
        end = time.monotonic() + _MAX_WAIT_SECONDS
        looks = 0
        while not self.query():
            looks += 1
            if looks % _LOOKS_PER_DEVICE_CHECK == 0:
                torch.cuda.current_stream().query()  # raises if there is nobody left to bring it
            if time.monotonic() > end:
                torch.cuda.synchronize()
                return
            time.sleep(_NAP_SECONDS)


_NAP_SECONDS = 2e-5  # between two looks at an event
_LOOKS_PER_DEVICE_CHECK = 32
_MAX_WAIT_SECONDS = 30.0

devices: dict[str, LateDevice] = {"cuda": Cuda()}
_dead: list[Any] = []


def is_device_error(error: BaseException) -> bool:
    """Whether an exception says that the device has failed, not that our code has."""
    kind = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    return (kind is not None and isinstance(error, kind)) or (
        isinstance(error, RuntimeError) and "CUDA error" in str(error)
    )


def died(*held: Any) -> None:
    """The device has failed: nothing of ours is sent to it any more.

    Args:
        held: What must outlive the process, because to drop it would ask the device: pinned memory, events.
    """
    for kind in [*devices]:
        if kind != "cpu":
            del devices[kind]
    _dead.append(held)
    _never_free(_dead)


def device_is_lost() -> bool:
    return bool(_dead)


class Fetch:
    """The values of tensors of one element each.

    Args:
        tensors: The tensors, on any devices.
        may_wait: Whether to wait for the devices now. Otherwise `has_arrived` says when the values are there.
    """

    def __init__(self, tensors: list[torch.Tensor], *, may_wait: bool) -> None:
        self._count = len(tensors)
        self._parts: list[tuple[list[int], torch.Tensor]] = []
        by_device: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(index)
        for place, indices in by_device.items():
            values = torch.stack([tensors[index].detach().double().reshape(()) for index in indices])
            device = None if may_wait else devices.get(place.type)
            if device is None:
                self._parts.append((indices, torch.cat([values.cpu(), torch.tensor([_ARRIVED], dtype=values.dtype)])))
                continue
            host, event = device.places(len(indices) + 1, values.dtype)
            host.zero_()
            device.arrange_many(host, event, torch.cat([values, torch.full_like(values[:1], _ARRIVED)]))
            self._parts.append((indices, host))

    @property
    def has_arrived(self) -> bool:
        return all(float(host[-1]) == _ARRIVED for _, host in self._parts)

    def values(self) -> list[float]:
        """The values in the order of the tensors; only after they have arrived."""
        found = [0.0] * self._count
        for indices, host in self._parts:
            for index, value in zip(indices, host[:-1].tolist(), strict=True):
                found[index] = value
        return found
