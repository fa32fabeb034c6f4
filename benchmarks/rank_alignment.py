"""How long it takes to name the one rank of thousands that left the common way, and what each rank has to send.

    python benchmarks/rank_alignment.py [--ranks 1024 16384] [--calls 2000]

The logs are generated: a training step of four collectives, again and again, and one rank that leaves one of them out,
makes one too many, or passes another shape. Everything runs in one process, also what the ranks would do themselves.
Times are CPU time: a busy machine does not change them.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Iterable

import msgspec

from torchmedic.detect.ranks.digest import RankDigest, cause, digest
from torchmedic.records import StackFrame
from torchmedic.records.ranks import Collective, RankLog


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
