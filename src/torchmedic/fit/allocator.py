"""A model of PyTorch's caching allocator for CUDA: which memory it reserves for which requests.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` in its default settings, for one stream:

* A request is rounded up to 512 bytes. Up to 1 MiB it is served from the small pool, otherwise from the large pool.
* New memory comes in segments: 2 MiB for the small pool; 20 MiB for requests below 10 MiB; otherwise the request,
  rounded up to 2 MiB.
* The smallest free block that is large enough is taken, the one with the lowest address among equals. What remains of
  the block is split off if it is at least 512 bytes (small pool) or more than 1 MiB (large pool).
* A freed block is merged with its free neighbours. Its segment stays reserved.
* If the device has no room for a segment, all segments that are entirely free are given back first.

With expandable segments, each pool is one segment that grows by 2 MiB (small) or 20 MiB (large), and every remainder of
512 bytes or more is split off.
"""

from __future__ import annotations

import bisect
from typing import Any

_UNIT_BYTES = 512  # sizes are multiples of it
_SMALL = 1 << 20  # the largest request of the small pool
_SMALL_SEGMENT = 2 << 20
_LARGE_SEGMENT = 20 << 20
_MIN_OWN_SEGMENT = 10 << 20  # requests from here on get a segment of their own size
_OWN_SEGMENT_STEP = 2 << 20


class OutOfMemory(Exception):
    """The device has no room for a request, even after the cache was given back."""

    def __init__(self, asked: int) -> None:
        super().__init__(asked)
        self.asked = asked


class Block:
    """A piece of a segment."""

    __slots__ = ("address", "after", "before", "free", "pool", "segment", "size")

    def __init__(self, pool: Pool, segment: int, address: int, size: int) -> None:
        self.pool = pool
        self.segment = segment  # the number of its segment
        self.address = address
        self.size = size
        self.free = True
        self.before: Block | None = None
        self.after: Block | None = None


class Pool:
    """The free blocks of small or of large requests, by size and address."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.last: Block | None = None  # the end of the expandable segment
        self._free: list[tuple[int, int, Any]] = []

    def add(self, block: Block) -> None:
        bisect.insort(self._free, (block.size, block.address, block), key=_order)

    def remove(self, block: Block) -> None:
        at = bisect.bisect_left(self._free, (block.size, block.address), key=_order)
        del self._free[at]

    def best(self, size: int) -> Block | None:
        at = bisect.bisect_left(self._free, (size, -1), key=_order)
        found: Block | None = self._free[at][2] if at < len(self._free) else None
        return found

    def blocks(self) -> list[Block]:
        return [entry[2] for entry in self._free]


def _order(entry: Any) -> tuple[int, int]:
    return (entry[0], entry[1])


def rounded(nbytes: int) -> int:
    """The bytes that the allocator hands out for a request."""
    return max(_UNIT_BYTES, -(-nbytes // _UNIT_BYTES) * _UNIT_BYTES)


class Allocator:
    """Serves requests as the caching allocator would.

    Args:
        capacity: Bytes of the device that may be reserved; without limit if None.
        expandable: Whether `expandable_segments:True` is set.
    """

    def __init__(self, capacity: int | None = None, *, expandable: bool = False) -> None:
        self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = 0
        self.retries = 0  # how often the cache had to be given back
        self._capacity = capacity
        self._expandable = expandable
        self._small, self._large = Pool(small=True), Pool(small=False)
        self._segments = 0
        self._address = 0

    def allocate(self, nbytes: int) -> Block:
        """A block for a request.

        Raises:
            OutOfMemory: There is no room.
        """
        size = rounded(nbytes)
        pool = self._small if size <= _SMALL else self._large
        block = pool.best(size)
        if block is None:
            block = self._grow(pool, size) if self._expandable else self._new_segment(pool, size)
        else:
            pool.remove(block)
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: Block) -> None:
        """Free a block; its memory stays reserved."""
        self.allocated -= block.size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                block.pool.remove(neighbour)
                self._merge(block, neighbour)
        block.pool.add(block)

    def _new_segment(self, pool: Pool, size: int) -> Block:
        if pool.small:
            length = _SMALL_SEGMENT
        elif size < _MIN_OWN_SEGMENT:
            length = _LARGE_SEGMENT
        else:
            length = -(-size // _OWN_SEGMENT_STEP) * _OWN_SEGMENT_STEP
        self._reserve(length, size)
        self._segments += 1
        block = Block(pool, self._segments, self._address, length)
        self._address += length + _UNIT_BYTES  # segments never touch each other
        return block

    def _grow(self, pool: Pool, size: int) -> Block:
        """Take a block at the end of the expandable segment."""
        last = pool.last
        reused = last.size if last is not None and last.free else 0
        step = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT
        length = -(-(size - reused) // step) * step
        self._reserve(length, size)
        if last is None:
            self._segments += 1
            block = Block(pool, self._segments, self._segments << 50, length)
        elif last.free:
            pool.remove(last)
            block = last
            block.size += length
        else:
            block = Block(pool, last.segment, last.address + last.size, length)
            block.before, last.after = last, block
        pool.last = block
        return block

    def _reserve(self, length: int, size: int) -> None:
        if self._capacity is not None and self.reserved + length > self._capacity:
            self.retries += 1
            self._give_back()
            if self.reserved + length > self._capacity:
                raise OutOfMemory(size)
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _give_back(self) -> None:
        for pool in (self._small, self._large):
            for block in pool.blocks():
                if self._expandable:
                    # Whole pages are unmapped. The hole that remains keeps its addresses, but is not used again here.
                    step = _SMALL_SEGMENT if pool.small else _LARGE_SEGMENT
                    pages = block.size // step * step
                    if pages and block is not pool.last:
                        pool.remove(block)
                        self.reserved -= pages
                        block.free = False
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size

    def _split(self, block: Block, size: int) -> None:
        left = block.size - size
        if left < _UNIT_BYTES or (left <= _SMALL and not block.pool.small and not self._expandable):
            return
        rest = Block(block.pool, block.segment, block.address + size, left)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        if block.pool.last is block:
            block.pool.last = rest
        block.pool.add(rest)

    def _merge(self, block: Block, neighbour: Block) -> None:
        """Let a block swallow a free neighbour."""
        if neighbour is block.before:
            block.address = neighbour.address
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.size += neighbour.size
        if block.pool.last is neighbour:
            block.pool.last = block
