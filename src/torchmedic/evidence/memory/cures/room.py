"""How much the failing step may use: what the process may have, and what of it is taken whatever the step does."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from torchmedic.evidence.memory.accounting.storages import memory_of
from torchmedic.evidence.memory.fake.peak import Weigh, highest
from torchmedic.evidence.memory.fake.whole_step import WholeStep
from torchmedic.replay.fake.births import Course

if TYPE_CHECKING:
    from torchmedic.evidence.memory.autopsy import Autopsy

_MAX_MMAP_THRESHOLD = 32 << 20  # bytes; glibc raises its threshold up to here
_USABLE = 0.95  # the rest is in pieces that nothing fits into


class Room(NamedTuple):
    """Bytes. `by_rows` is what is taken by tensors that shrink with the batch; `taken` all else."""

    total: int
    taken: int
    by_rows: int
    weigh: Weigh | None = None  # where the allocator takes more for a storage than its size

    def made(self, course: Course) -> int:
        """The most bytes that a step of this course takes."""
        return highest(course, self.weigh)

    def needed(self, made: int, share: float = 1.0) -> int:
        """Bytes that the whole process needs for a step that makes so many, with a share of the rows."""
        return self.taken + int(self.by_rows * share) + made

    def has(self, needed: int) -> bool:
        return needed <= _USABLE * self.total


def room_of(autopsy: Autopsy, step: WholeStep, rows: int | None) -> Room | None:
    """The room for a step; None if the amount of memory is not known."""
    total = _total(autopsy)
    if total is None:
        return None
    in_use = _in_use(autopsy)
    of_step = _of_step(autopsy, step)
    entries = autopsy.book.entries
    made = sum(memory.nbytes for key, (_, memory) in entries.items() if key in of_step)
    batch = {
        memory.key: memory.nbytes
        for tensor in autopsy.batch
        if rows is not None and tensor.dim() and len(tensor) == rows
        for memory in memory_of(tensor)
        if memory.key in entries and memory.key not in of_step
    }
    by_rows = sum(batch.values())
    weigh = None if autopsy.exhaustion.on_device else _on_host
    return Room(total, max(0, in_use - made - by_rows), by_rows, weigh)


def _on_host(size: float) -> float:
    """Bytes that malloc takes: a mapping of its own for what is large, else pieces of a heap that is not given back."""
    return 1.1 * size if size >= _MAX_MMAP_THRESHOLD else 3.0 * size


def _total(autopsy: Autopsy) -> int | None:
    """The most bytes that the process may have, without what other processes have."""
    measured = autopsy.measured
    if autopsy.exhaustion.on_device:
        left = measured.capacity - measured.outside if measured.capacity is not None else None
        return min((each for each in (measured.limit, left) if each is not None), default=None)
    host = measured.host
    if host is None:
        return None
    if host.address_limit is not None:
        return host.address_limit
    free = host.resident + host.available if host.resident is not None and host.available is not None else None
    return min((each for each in (host.cgroup_limit, free) if each is not None), default=None)


def _in_use(autopsy: Autopsy) -> int:
    """Bytes in use now, after the exception has unwound."""
    measured, host = autopsy.measured, autopsy.measured.host
    if host is not None and not autopsy.exhaustion.on_device:
        return (host.address_space if host.address_limit is not None else host.resident) or 0
    return measured.allocated_now if measured.where == "cuda" else autopsy.book.everything


def _of_step(autopsy: Autopsy, step: WholeStep) -> set[int]:
    """The storages that a replayed step makes itself, or frees."""
    book = autopsy.book
    found = {key for key, (heading, _) in book.entries.items() if heading in ("saved activations", "gradients")}
    found |= {key for key, (_, each) in book.held.items() if autopsy.is_of_failing_call(each.holder)}
    left: list[torch.Tensor] = [tensor for tensors in step.left_over().values() for tensor in tensors]
    return found | {memory.key for tensor in [*left, *step.replaced()] for memory in memory_of(tensor)}
