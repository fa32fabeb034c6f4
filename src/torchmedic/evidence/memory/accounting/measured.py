"""How much memory there is, and how much of it was taken when it ran out, as driver, allocator and system say."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from torchmedic.detect.failures.exhaustion import Exhaustion
from torchmedic.observe.memory.cuda_refusals import Refusal, last_refusal
from torchmedic.observe.memory.host import HostMemory, host_memory

# cuBLAS keeps memory of its own for every thread and stream: these are the sizes that torch gives it.
_WORKSPACES = frozenset({8_519_680, 33_554_432, 4_325_376, 1_048_576, 33_554_432 * 2})


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. `used` is of the whole device (by everybody) or of the process on the host, when memory ran out.

    `allocated` and `reserved` are those of the allocator at that moment, `allocated_now` after the exception has
    unwound. `limit` is what the process may have at most: of the device, or of the host.
    """

    where: str
    used: int
    limit: int | None = None
    capacity: int | None = None
    free: int | None = None
    allocated: int = 0
    allocated_now: int = 0
    reserved: int = 0
    requested: int | None = None
    inactive_split: int = 0
    retries: int = 0
    workspaces: int = 0
    others: int | None = None
    host: HostMemory | None = None
    exact: bool = False  # measured at the moment itself

    @property
    def is_capped(self) -> bool:
        """Whether the process may have less than there is: what others hold of the device is then beside the point."""
        if self.limit is None or self.capacity is None or self.free is None:
            return False
        return self.limit < self.capacity and self.limit - self.reserved < self.free

    @property
    def cache(self) -> int:
        return max(0, self.reserved - self.allocated)

    @property
    def outside(self) -> int:
        """In use on the device, but not by this process's allocator: the context, libraries, other processes."""
        return max(0, self.used - self.reserved)


def refusal_of(exhaustion: Exhaustion) -> Refusal | None:
    """What the allocator said about the allocation that failed."""
    refusal = last_refusal()
    if refusal is None or exhaustion.beside:
        return None
    if exhaustion.where != "cuda" or (exhaustion.index or 0) != refusal.device:
        return None
    asked = exhaustion.asked
    # The exception's number is rounded to hundredths of its unit.
    return refusal if asked is None or abs(asked - refusal.asked) <= max(1 << 20, asked // 50) else None


def measure(exhaustion: Exhaustion, addresses: Iterable[int] = ()) -> Measured:
    """Read the use of memory now, without an allocation."""
    if not exhaustion.on_device:
        return _of_host()
    if exhaustion.where == "cuda" and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError, AssertionError):
            return _of_card(exhaustion, frozenset(addresses))
    return _of_words(exhaustion)


def _of_host() -> Measured:
    host = host_memory()
    limits = [each for each in (host.address_limit, host.cgroup_limit, host.total) if each is not None]
    return Measured(
        where="host",
        used=host.resident or 0,
        limit=min(limits, default=None),
        capacity=host.total,
        free=host.available,
        host=host,
    )


def _of_words(said: Exhaustion) -> Measured:
    """The numbers in the exception's own text, for a device that cannot be asked."""
    allocated, unallocated = said.allocated or 0, said.unallocated or 0
    used = said.capacity - said.free if said.capacity is not None and said.free is not None else 0
    return Measured(
        where=said.where,
        used=max(used, allocated + unallocated),
        limit=said.allowed or said.capacity,
        capacity=said.capacity,
        free=said.free,
        allocated=allocated,
        allocated_now=allocated,
        reserved=allocated + unallocated,
        others=said.others,
    )


def _of_card(said: Exhaustion, addresses: frozenset[int]) -> Measured:
    device = said.index if said.index is not None else torch.cuda.current_device()
    stats: dict[str, Any] = torch.cuda.memory_stats(device)
    refusal = refusal_of(said)
    free, total = torch.cuda.mem_get_info(device)
    now = int(stats.get("allocated_bytes.all.current", 0))
    blocks = _blocks(device)
    allocated = refusal.allocated if refusal is not None else said.allocated or now
    reserved = refusal.reserved if refusal is not None else int(stats.get("reserved_bytes.all.current", 0))
    if refusal is not None:
        free = refusal.free  # what it calls the total is what the process was allowed, where that was limited
    return Measured(
        where="cuda",
        used=total - free,
        limit=said.allowed or _allowed(device, total),
        capacity=total,
        free=free,
        allocated=max(allocated, now) if refusal is None else allocated,
        allocated_now=now,
        reserved=reserved,
        requested=int(stats.get("requested_bytes.all.current", 0)) or None,
        inactive_split=refusal.inactive_split if refusal is not None else 0,
        retries=int(stats.get("num_alloc_retries", 0)),
        workspaces=sum(
            size for address, size, used in blocks if used and address not in addresses and size in _WORKSPACES
        ),
        others=said.others if said.others is not None else _others(device),
        exact=refusal is not None,
    )


def _allowed(device: int, total: int) -> int:
    fraction = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
    with contextlib.suppress(Exception):
        return int(total * fraction(device)) if fraction is not None else total
    return total


def _blocks(device: int) -> list[tuple[int, int, bool]]:
    """The blocks of the allocator: address, size, and whether the block is in use."""
    found = []
    with contextlib.suppress(Exception):
        for segment in torch.cuda.memory_snapshot():
            if segment.get("device") != device:
                continue
            address = int(segment.get("address", 0))
            for block in segment.get("blocks", ()):
                start = int(block.get("address", address))
                used = str(block.get("state", "")).startswith("active")
                size = int(block.get("requested_size") or block["size"]) if used else int(block["size"])
                found.append((start, size, used))
                address = start + int(block["size"])
    return found


def _others(device: int) -> int | None:
    """Bytes of other processes on a card, where the driver knows this process by the number that we know it by."""
    try:
        import pynvml

        pynvml.nvmlInit()
        properties: Any = torch.cuda.get_device_properties(device)
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        processes = {each.pid: each.usedGpuMemory or 0 for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        return sum(processes.values()) - processes[os.getpid()] if os.getpid() in processes else None
    except Exception:
        return None
