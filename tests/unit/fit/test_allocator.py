"""The model of the caching allocator follows the documented rules: rounding, pools, segments, splits, merges."""

from __future__ import annotations

import itertools
import random

import pytest

from torchmedic.fit.allocator import Allocator, Block, OutOfMemory, rounded

MIB = 1 << 20


def test_requests_are_rounded_to_512_bytes() -> None:
    assert [rounded(size) for size in (1, 512, 513, 1 << 20)] == [512, 512, 1024, 1 << 20]
    allocator = Allocator()
    allocator.allocate(1)
    assert allocator.allocated == 512


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),  # the largest request of the small pool
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # from here on the request itself, in steps of 2 MiB
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_the_size_of_a_segment(size: int, segment: int) -> None:
    allocator = Allocator()
    allocator.allocate(size)
    assert allocator.reserved == segment


def test_a_segment_serves_several_requests() -> None:
    allocator = Allocator()
    for _ in range(4):
        allocator.allocate(MIB // 2)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(512)
    assert allocator.reserved == 4 * MIB


def test_small_and_large_requests_share_nothing() -> None:
    allocator = Allocator()
    allocator.allocate(2 * MIB)
    allocator.allocate(512)
    assert allocator.reserved == 22 * MIB


def test_a_remainder_of_up_to_1_mib_is_not_split_off_in_the_large_pool() -> None:
    allocator = Allocator()
    allocator.allocate(19 * MIB)  # of its own segment of 20 MiB
    assert allocator.allocated == 20 * MIB  # the last MiB belongs to the block
    allocator = Allocator()
    first = allocator.allocate(9 * MIB)
    assert first.size == 9 * MIB  # of a segment of 20 MiB


def test_freed_memory_stays_reserved_and_is_used_again() -> None:
    allocator = Allocator()
    block = allocator.allocate(64 * MIB)
    allocator.release(block)
    assert (allocator.allocated, allocator.reserved) == (0, 64 * MIB)
    allocator.allocate(60 * MIB)
    assert allocator.reserved == 64 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 20, 30)]
    for block in blocks:
        allocator.release(block)
    assert allocator.allocate(18 * MIB).address == blocks[1].address


def test_free_neighbours_become_one_block() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]  # all in one segment of 20 MiB
    assert allocator.reserved == 20 * MIB
    for number in (1, 3, 2):
        allocator.release(blocks[number])
    assert allocator.allocate(12 * MIB).address == blocks[1].address
    assert allocator.reserved == 20 * MIB


def test_fragmentation_reserves_more_than_is_in_use() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    for block in blocks[::2]:
        allocator.release(block)
    allocator.allocate(8 * MIB)  # 12 MiB are free, but no 8 MiB in one piece
    assert allocator.reserved == 40 * MIB


def test_the_cache_is_given_back_before_memory_runs_out() -> None:
    allocator = Allocator(100 * MIB)
    allocator.release(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.reserved, allocator.retries, allocator.peak_reserved) == (80 * MIB, 1, 80 * MIB)
    with pytest.raises(OutOfMemory) as raised:
        allocator.allocate(30 * MIB)
    assert raised.value.asked == 30 * MIB


def test_a_segment_that_is_partly_in_use_is_not_given_back() -> None:
    allocator = Allocator(40 * MIB)
    blocks = [allocator.allocate(8 * MIB) for _ in range(2)]
    allocator.release(blocks[0])
    with pytest.raises(OutOfMemory):
        allocator.allocate(22 * MIB)


def test_expandable_segments_grow_in_place() -> None:
    allocator = Allocator(expandable=True)
    first = allocator.allocate(30 * MIB)
    assert allocator.reserved == 40 * MIB  # pages of 20 MiB
    allocator.release(first)
    allocator.allocate(50 * MIB)
    assert allocator.reserved == 60 * MIB  # the free block at the end was extended
    plain = Allocator()
    plain.release(plain.allocate(30 * MIB))
    plain.allocate(50 * MIB)
    assert plain.reserved == 80 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_blocks_never_overlap_and_bytes_add_up(expandable: bool) -> None:
    generator = random.Random(0)
    allocator = Allocator(expandable=expandable)
    alive: list[Block] = []
    for _ in range(3000):
        if alive and generator.random() < 0.48:
            allocator.release(alive.pop(generator.randrange(len(alive))))
        else:
            size = int(2 ** generator.uniform(4, 26))
            block = allocator.allocate(size)
            assert block.size >= size
            alive.append(block)
    assert allocator.allocated == sum(block.size for block in alive)
    assert allocator.allocated <= allocator.reserved
    spans = sorted((block.address, block.address + block.size) for block in alive)
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans))
    for block in alive:
        allocator.release(block)
    assert allocator.allocated == 0
