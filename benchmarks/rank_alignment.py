"""How long it takes to name the one rank of thousands that left the common way, and what each rank has to send.

    python benchmarks/rank_alignment.py [--ranks 1024 16384] [--calls 2000]

The logs are generated: a training step of four collectives, again and again, and one rank that leaves one of them out,
makes one too many, or passes another shape. Everything runs in one process, also what the ranks would do themselves.

The product compares whole logs. Here each rank first sends a digest, a hash of its first n calls for every n that is a
multiple of the stride, so that only a few ranks send their whole log: that is what a job of this size would need.
Times are CPU time: a busy machine does not change them.
"""

from __future__ import annotations

import argparse
import array
import hashlib
import random
import resource
import time
import zlib
from collections.abc import Callable, Iterable, Sequence

import msgspec

from torchmedic.detect.ranks.alignment import first_difference
from torchmedic.detect.ranks.comparable import is_compared
from torchmedic.records import StackFrame
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


def call(op: str, line: int, *shape: int) -> Collective:
    frames = tuple(StackFrame(file="/home/user/project/train.py", line=at, function="step") for at in (line, 200))
    return Collective(op=op, shapes=(shape,), dtypes=("float32",), frames=frames)


STEP = [call("all_reduce", 41, 4096), call("all_reduce", 41, 1024), call("all_gather", 47, 8), call("barrier", 52)]
FAULTS = ("extra", "missing", "shape")


class Job:
    """Logs made when they are asked for, so that only digests are held."""

    def __init__(self, ranks: int, calls: int, fault: str, seed: int) -> None:
        chance = random.Random(seed)
        self.ranks, self.fault = ranks, fault
        self.culprit = chance.randrange(ranks)
        self.common = (STEP * (calls // len(STEP) + 1))[:calls]
        self.at = chance.randrange(calls // 2, calls - 8)

    def log(self, rank: int) -> RankLog:
        calls = list(self.common)
        if rank == self.culprit:
            if self.fault == "extra":
                calls[self.at : self.at] = [call("barrier", 99)]
            elif self.fault == "missing":
                del calls[self.at]
            else:
                calls[self.at] = call(calls[self.at].op, calls[self.at].frames[0].line, 7)
                calls[self.at] = call("all_reduce", 41, 7) if calls[self.at].op == "barrier" else calls[self.at]
        return RankLog(rank=rank, pid=rank, world_size=self.ranks, calls=tuple(calls), complete=True)

    def logs(self, ranks: Iterable[int]) -> list[RankLog]:
        return [self.log(rank) for rank in ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    for ranks in options.ranks:
        for seed, fault in enumerate(FAULTS):
            job = Job(ranks, options.calls, fault, seed)
            begun = time.process_time()
            digest(job.log(0))
            alone = time.process_time() - begun
            known: dict[int, tuple[str, int]] = {}
            digests: list[RankDigest] = []
            keep = []
            begun = time.process_time()
            for rank in range(ranks):
                log = job.log(rank)
                if rank == job.culprit:
                    keep.append(log)  # a call object of its own may not be freed: its identity is remembered
                digests.append(digest(log, known))
            sent = len(msgspec.msgpack.encode(digests[0]))
            middle = time.process_time()
            found = cause(digests, job.logs)
            ended = time.process_time()
            right = found is not None and found.culprits == (job.culprit,) and abs(found.index - job.at) <= len(STEP)
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{ranks:6} ranks x {options.calls} calls, {fault:8} right: {right!s:5} total {ended - begun:6.2f} s "
                f"(verdict {ended - middle:5.2f} s, digest of one rank {alone * 1e3:5.1f} ms, {sent} B sent by a rank) "
                f"peak {memory:5.0f} MiB"
            )


if __name__ == "__main__":
    main()
