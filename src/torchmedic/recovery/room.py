"""Room in memory, made step by step until a call succeeds."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from torchmedic.detect.failures.exhaustion import exhaustion_of_error
from torchmedic.observe.memory.headroom import address_limit, data_limit, headroom, sizes
from torchmedic.records.recovery import Means
from torchmedic.recovery.living_tensors import unseen
from torchmedic.recovery.optimizer_memory import OptimizerMemory
from torchmedic.recovery.saved_tensors import SavedTensors

UNUSABLE_SHARE = 0.03  # share of what is allowed, in pieces that are too small
UPDATE_TEMPORARIES = 4  # copies of the weights for which there must be room in an update without the guard
_MIN_WANTED_BYTES = 1 << 20
_MAX_VAIN_RETRIES = 3  # a collection of garbage takes longer than a step
_M_MMAP_THRESHOLD = -3  # of `mallopt`
_MIN_MAPPED_BYTES = 1 << 20


class Room(NamedTuple):
    """What was done to make room, and the bytes that it parked."""

    means: Means
    nbytes: int


class RoomMaker:
    """Knows what can be parked, and in which order: unused memory, saved activations, optimizer memory."""

    def __init__(self, saved: SavedTensors, optimizers: OptimizerMemory) -> None:
        self._saved = saved
        self._optimizers = optimizers
        self.no_room = ""  # why nothing more could be parked
        self._vain_retries = 0

    def rooms(self, error: BaseException, busy: frozenset[int], *, is_update: bool, least: int) -> Iterator[Room]:
        """Make more and more room for a call that failed; ends when nothing is left to park.

        Args:
            error: What the call raised.
            busy: Keys of the storages that the call uses.
            is_update: Whether an optimizer is updating weights: gradients may then be parked too.
            least: The bytes that were parked in this step already. More than as many are parked at once, as the step
                would run out of memory at every call otherwise.
        """
        found = exhaustion_of_error(error)
        asked = found.asked if found is not None else None
        is_first = not least and self._vain_retries < _MAX_VAIN_RETRIES
        if is_first:  # what is unused was freed when the step first ran out of memory
            free_unused_memory()
            yield Room("retry", 0)
            self._vain_retries += 1
        self.no_room = ""
        wanted, total = max(asked or 0, least, _MIN_WANTED_BYTES), 0
        while free := self._parked(functools.partial(self._saved.park, wanted, busy)):
            total += free
            yield Room("activations", total)
            wanted *= 2
        wanted = max(asked or 0, _MIN_WANTED_BYTES)
        while free := self._parked(functools.partial(self._optimizers.park, wanted, busy, gradients=is_update)):
            total += free
            yield Room("optimizer", total)
            wanted *= 2
        if not is_first:
            free_unused_memory()
            yield Room("retry", 0)

    def has_room_for_update(self) -> bool:
        """Whether updates, which all need the same memory, can go without the guard."""
        needed: dict[torch.device, int] = {}
        for each in self._optimizers.parameters:
            needed[each.device] = needed.get(each.device, 0) + each.nbytes
        known = [(in_use_and_limit(device), nbytes) for device, nbytes in needed.items()]
        return all(found is None or found[1] - found[0] > UPDATE_TEMPORARIES * nbytes for found, nbytes in known)

    def park_saved(self, wanted: int, *, search: bool = True) -> int:
        """Park some bytes of saved tensors before they are short; returns the bytes that became free."""
        return self._parked(functools.partial(self._saved.park, wanted, frozenset(), search=search))

    def park_optimizer(self, wanted: int) -> int:
        """Park some bytes of optimizer state, which nothing needs before the update; returns the free bytes."""
        return self._parked(functools.partial(self._optimizers.park, wanted, frozenset(), gradients=False))

    def _parked(self, park: Callable[[], int]) -> int:
        try:
            with headroom(), unseen():
                free = park()
        except OSError as refused:
            self.no_room = refused.strerror or str(refused)
            return 0
        if free:
            give_back_caches()
        return free


def free_unused_memory() -> None:
    """Free what nobody uses: reference cycles, and what the allocators keep."""
    with headroom():
        gc.collect()
    give_back_caches()


def give_back_caches() -> None:
    """Give back what the allocators keep: cached blocks of the device, free pages of the heap."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def fraction_of(device: int) -> float:
    """The share of a device that `set_per_process_memory_fraction` leaves to this process."""
    asked = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # not every version has it
    return float(asked(device)) if asked is not None else 1.0


def in_use_and_limit(device: torch.device) -> tuple[int, int] | None:
    """The bytes in use and the bytes that are allowed; None where there is no limit."""
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError, KeyError):
            found = torch.cuda.memory_stats_as_nested_dict(device)
            used, reserved = (found[each]["all"]["current"] for each in ("allocated_bytes", "reserved_bytes"))
            return used, _device_limit(device, reserved)
        return None
    limits = [(name, limit) for name, limit in (("VmSize", address_limit()), ("VmData", data_limit())) if limit]
    if not limits:
        return None
    used = sizes()
    return min(((used.get(name, 0), limit) for name, limit in limits), key=lambda each: each[1] - each[0])


def refills() -> int:
    """How often the allocators of devices had to give all cached blocks back, and wait, to get memory."""
    if not torch.cuda.is_initialized():
        return 0
    devices = range(torch.cuda.device_count())
    return sum(torch.cuda.memory_stats_as_nested_dict(each).get("num_alloc_retries", 0) for each in devices)


def _device_limit(device: torch.device, reserved: int) -> int:
    """The bytes that the tensors of this process can take of a device."""
    free, total = torch.cuda.mem_get_info(device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    return min(free + reserved, int(fraction_of(index) * total))


def keep_blocks_whole() -> None:
    """Where the host has a limit, have its heap map large blocks singly: small ones would break the freed ones up.

    A heap keeps its address space when its blocks are freed, and nothing large fits between what is left in it.
    """
    if not address_limit() and not data_limit():
        return
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MIN_MAPPED_BYTES)
