"""A copy of the weights from a step whose loss was finite, on a device that is read late.

A gradient that is not finite has spoiled the weights there before it is noticed. With the copy the step that made it
can be replayed all the same. It costs memory and time of the device: it is taken only where plenty of memory is free,
renewed as often as a small share of the step's time allows, and given back when memory gets scarce.
"""

from __future__ import annotations

import functools
import time
import weakref
from typing import Any, NamedTuple

import torch

from torchmedic.observe.device.async_devices import LateDevice, devices
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.source.objects.weak_table import WeakTable

_SHARE_OF_STEP = 0.002  # of its time, for copies
_MIN_FREE_TO_TAKE = 16  # free memory, in sizes of the copy
_MIN_FREE_TO_KEEP = 4  # below that the copy is given back
_RECHECK_SECONDS = 2.0  # between two looks at the free memory
_BYTES_PER_SECOND = 4e11  # until it has been measured: what a slow card copies
_LAUNCH_SECONDS = 3e-5  # seconds of the host, until it has been measured
_MAX_BUFFER_BYTES = 1 << 22
_FIRST_BIG_COPY = 2  # updates: by then it is known how long a step takes and how much memory it needs
_RETRY_UPDATES = 256  # before an optimizer that could not be copied is looked at again
_MAX_SMALL_COPY_BYTES = 1 << 26


class Original(NamedTuple):
    """A tensor that is trained with, and its values of an earlier step."""

    tensor: torch.Tensor
    value: torch.Tensor
    step: int


class _Copy:
    """The copied tensors of one optimizer."""

    def __init__(self, tensors: list[torch.Tensor], device: LateDevice) -> None:
        self.tensors = tensors
        self.device = device
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self.values: list[torch.Tensor] = []
        self.step = -1
        self.wait = 0  # updates until it is renewed
        self.host_seconds = _LAUNCH_SECONDS
        self.device_seconds = 2 * self.nbytes / _BYTES_PER_SECOND
        self._timer: tuple[Any, Any] | None = None
        self._is_timed = False

    def renew(self, step: int) -> None:
        started = time.perf_counter()
        if not self.values:
            self.values = _room_for(self.tensors)
            self._timer = self.device.timer()
        timer = self._timer if not self._is_timed else None
        self._measure()
        if timer is not None:
            timer[0].record()
        with torch.no_grad():
            torch._foreach_copy_(self.values, self.tensors)
        if timer is not None:
            timer[1].record()
            self._is_timed = True
        if self.step >= 0:  # the first call makes room and loads a kernel
            self.host_seconds = min(time.perf_counter() - started, 0.01)
        self.step = step

    def _measure(self) -> None:
        """How long a copy took, if that is known by now."""
        if self._timer is not None and self._is_timed and self._timer[1].query():
            self.device_seconds = float(self._timer[0].elapsed_time(self._timer[1])) / 1e3
            self._timer = None

    def fits(self, tensors: list[torch.Tensor]) -> bool:
        return len(tensors) == len(self.tensors) and all(a is b for a, b in zip(tensors, self.tensors, strict=True))

    def interval(self, usual_step: float) -> int:
        return max(1, round((self.host_seconds + self.device_seconds) / max(_SHARE_OF_STEP * usual_step, 1e-7)))


class Rewind:
    """The copies of all optimizers."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[_Copy, weakref.ref[Any]]] = {}
        self._waiting: dict[int, int] = {}  # updates until an optimizer without a copy is looked at
        self._roots: WeakTable[bool] = WeakTable()
        self._known_roots: set[int] = set()
        self._next_look = 0.0
        self._is_told = False
        self.given_up = False

    def see(self, module: torch.nn.Module) -> None:
        """A module that the user calls: its buffers are copied with the weights."""
        if id(module) not in self._known_roots:
            self._known_roots.add(id(module))
            self._roots[module] = True

    def offer(self, optimizer: Any, step: int, usual_step: float) -> None:
        """The weights of this optimizer have just given a finite loss, and are about to be changed."""
        key = id(optimizer)
        found = self._copies.get(key)
        if found is None:
            left = self._waiting[key] = self._waiting.get(key, 1) - 1
            if left <= 0 and not self.given_up:
                self._waiting[key] = _RETRY_UPDATES
                self._take(optimizer, step, usual_step)
            return
        copy = found[0]
        copy.wait -= 1
        if copy.wait <= 0:
            self._renew(optimizer, copy, step, usual_step)

    def originals(self) -> list[Original]:
        """The copied tensors with their values."""
        found: dict[int, Original] = {}
        for copy, _ in self._copies.values():
            for tensor, value in zip(copy.tensors, copy.values, strict=False):
                same = tensor.shape == value.shape and tensor.dtype == value.dtype and tensor.device == value.device
                if same and copy.step >= 0:
                    found[id(tensor)] = Original(tensor, value, copy.step)
        return list(found.values())

    def copied_values(self) -> list[torch.Tensor]:
        """The tensors that the copies themselves are made of."""
        return [value for copy, _ in self._copies.values() for value in copy.values]

    def give_up(self) -> None:
        """Memory is scarce, or something went wrong: the copies are dropped for good."""
        self.given_up = True
        self._copies.clear()

    def _out_of_memory(self, *_: Any) -> None:
        self.give_up()

    def _take(self, optimizer: Any, step: int, usual_step: float) -> None:
        tensors = self._tensors(optimizer)
        kinds = {tensor.device for tensor in tensors}
        if len(kinds) != 1:
            return
        where = kinds.pop()
        device = devices.get(where.type)
        if device is None or torch._C._len_torch_dispatch_stack():
            return
        copy = _Copy(tensors, device)
        if copy.nbytes > _MAX_SMALL_COPY_BYTES and step < _FIRST_BIG_COPY:
            self._waiting[id(optimizer)] = _FIRST_BIG_COPY - step
            return
        if copy.nbytes * _MIN_FREE_TO_TAKE > device.free_bytes(where):
            return
        if not self._is_told:
            self._is_told = True
            device.when_out_of_memory(self._out_of_memory)
        copies = self._copies
        key = id(optimizer)
        self._waiting.pop(key, None)
        copies[key] = (copy, weakref.ref(optimizer, functools.partial(copies.pop, key)))
        self._renew(optimizer, copy, step, usual_step)

    def _renew(self, optimizer: Any, copy: _Copy, step: int, usual_step: float) -> None:
        if torch._C._len_torch_dispatch_stack():
            return
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _RECHECK_SECONDS
            if copy.nbytes * _MIN_FREE_TO_KEEP > copy.device.free_bytes(copy.tensors[0].device):
                self._copies.pop(id(optimizer), None)
                return
        try:
            if copy.step >= 0 and not copy.fits(self._tensors(optimizer)):
                self._copies.pop(id(optimizer), None)
                return
            copy.renew(step)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "CUDA error" not in str(error):
                self.give_up()
                return
            raise
        copy.wait = copy.interval(usual_step) if usual_step > 0 else 1

    def _tensors(self, optimizer: Any) -> list[torch.Tensor]:
        """The weights of an optimizer, and the small buffers of the modules that they are called in."""
        weights = [tensor for tensor in parameters_of(optimizer) if is_plain(tensor)]
        mine = {id(tensor) for tensor in weights}
        if not weights:
            return []
        return [*weights, *(buffer for buffer in self.buffers(weights) if id(buffer) not in mine)]

    def buffers(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """The small buffers of the modules that weights are called in, on the same device."""
        mine = {id(tensor) for tensor in weights}
        found = {
            id(buffer): buffer
            for root in self._roots.alive()
            if any(id(tensor) in mine for tensor in root.parameters())
            for buffer in root.buffers()
            if is_plain(buffer) and buffer.device == weights[0].device and buffer.nbytes <= _MAX_BUFFER_BYTES
        }
        return list(found.values())


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is an ordinary one that lies whole on one device."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and (tensor.is_floating_point() or tensor.is_complex())
        and tensor.numel() > 0
    )


def _room_for(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors like these in one allocation per dtype: many small allocations would fragment the memory."""
    whole: dict[torch.dtype, tuple[torch.Tensor, int]] = {}
    found = []
    for dtype in {tensor.dtype for tensor in tensors}:
        size = sum(_padded(tensor) for tensor in tensors if tensor.dtype is dtype)
        whole[dtype] = (torch.empty(size, dtype=dtype, device=tensors[0].device), 0)
    for tensor in tensors:
        memory, at = whole[tensor.dtype]
        whole[tensor.dtype] = (memory, at + _padded(tensor))
        if _is_dense(tensor):
            found.append(memory.as_strided(tensor.shape, tensor.stride(), at))
        else:
            found.append(memory[at : at + tensor.numel()].view(tensor.shape))
    return found


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() // 64) * 64


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
