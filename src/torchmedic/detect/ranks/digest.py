"""The log of a rank in a few hundred bytes, so that the logs of thousands of ranks can be compared in one place.

A digest holds a hash of the first n calls for every n that is a multiple of the stride. Two logs with the same hash
at one place were equal up to it, so bisection finds where they part. Only the ranks that are needed to name the cause
then send their whole log: a few of the common way, and one of each other way.
"""

from __future__ import annotations

import array
import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence

import msgspec

from torchmedic.detect.ranks.alignment import first_difference, is_compared
from torchmedic.records.ranks import Collective, Difference, RankLog

STRIDE = 32  # calls between two hashes
MAX_HASHES = 128  # of one group; of a longer log the newest
MAX_GROUPS = 16
_MAX_WAYS = 8  # other ways of which one rank is asked for its log
_OF_COMMON = 3  # ranks of the common way that are asked


class GroupDigest(msgspec.Struct, frozen=True, array_like=True):
    """The calls of one group: how many, and the hashes of their beginnings. `skipped` hashes were left out in front."""

    group: str
    count: int
    hashes: tuple[int, ...]
    skipped: int = 0


class RankDigest(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    groups: tuple[GroupDigest, ...]


def digest(log: RankLog, known: dict[int, tuple[str, int]] | None = None) -> RankDigest:
    """What a rank sends. `known` remembers the hashes of call objects that several logs share."""
    memo = {} if known is None else known
    streams: dict[str, list[int]] = {"0": []}
    for call in log.calls:
        found = memo.get(id(call))
        if found is None:
            found = memo[id(call)] = _hashed(call)
        group, value = found
        if group:
            (streams.get(group) or streams.setdefault(group, [])).append(value)
    return RankDigest(log.rank, tuple(_group(group, values) for group, values in list(streams.items())[:MAX_GROUPS]))


def _hashed(call: Collective) -> tuple[str, int]:
    """The group and the hash of a call; no group for what is not compared."""
    if not is_compared(call):
        return "", 0
    return call.group, zlib.crc32(repr((call.content, call.site)).encode())


def _group(group: str, values: list[int]) -> GroupDigest:
    sofar = hashlib.blake2b(digest_size=8)
    hashes = []
    for start in range(0, len(values), STRIDE):
        sofar.update(array.array("L", values[start : start + STRIDE]).tobytes())
        hashes.append(int.from_bytes(sofar.digest(), "little"))
    skipped = max(0, len(hashes) - MAX_HASHES)
    return GroupDigest(group, len(values), tuple(hashes[skipped:]), skipped)


def cause(digests: Sequence[RankDigest], fetch: Callable[[Iterable[int]], list[RankLog]]) -> Difference | None:
    """The first difference of a job of any size. `fetch` gets the whole logs of some ranks."""
    ways: dict[tuple[GroupDigest, ...], list[int]] = {}
    for each in digests:
        ways.setdefault(each.groups, []).append(each.rank)
    if len(ways) < 2:
        return None
    ordered = sorted(ways.values(), key=len, reverse=True)
    asked = {rank: ranks for ranks in ordered[1 : 1 + _MAX_WAYS] for rank in ranks[:1]}
    asked |= dict.fromkeys(ordered[0][:_OF_COMMON], ordered[0])
    difference = first_difference(sorted(fetch(asked), key=lambda log: log.rank))
    if difference is None:
        return None
    culprits = {rank for each in difference.culprits for rank in asked[each]}
    others = {rank for each in difference.others for rank in asked[each]} - culprits
    return msgspec.structs.replace(difference, culprits=tuple(sorted(culprits)), others=tuple(sorted(others)))
