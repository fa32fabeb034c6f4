"""Records of a job of several ranks: the collectives that each rank called, and what became of each rank.

Like all records, nothing here imports torch: the parent reads all of it.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from torchmedic.records.report import StackFrame

# ended: by itself and well. raised: by an exception. died: by a signal.
Fate = Literal["running", "ended", "raised", "died", "unknown"]


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a collective, or of `send` and `recv`, on one rank.

    `ordinal` counts the calls of the same source in the same group, from 1. `peer` is the source or destination rank,
    `tag` that of a message: `send` and `recv` with different tags do not meet.
    `frames` are the user's frames, innermost first; `library` are those of libraries other than torch, such as a
    Trainer. `native` is that torch made the call itself, in C++: the gradient buckets of DistributedDataParallel, for
    example. `thread` is 0 for the thread that joined the job, and counts the others. `time` is in seconds since the
    epoch.
    """

    op: str
    group: str = "0"
    ordinal: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    peer: int | None = None
    tag: int = 0
    frames: tuple[StackFrame, ...] = ()
    library: tuple[StackFrame, ...] = ()
    native: bool = False
    thread: int = 0
    time: float = 0.0

    @property
    def content(self) -> tuple[object, ...]:
        """What all ranks of the group must agree on."""
        return (self.op, self.group, self.shapes if self.op in SAME_SHAPES else (), self.dtypes, self.root)

    @property
    def root(self) -> int | None:
        return self.peer if self.op in ROOTED else None

    @property
    def nbytes(self) -> int:
        """The size of the only tensor of the call; 0 if there are several."""
        bits = "".join(filter(str.isdigit, self.dtypes[0])) if len(self.dtypes) == len(self.shapes) == 1 else ""
        return math.prod(self.shapes[0]) * int(bits) // 8 if bits else 0

    @property
    def site(self) -> tuple[tuple[str, int], ...]:
        """The lines of the user's code that led to the call."""
        return tuple((frame.file, frame.line) for frame in self.frames)

    @property
    def path(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """All lines that led to the call, those of libraries too."""
        return self.site, tuple((frame.file, frame.line) for frame in self.library)


# Collectives whose tensors must have the same shapes on all ranks. The "shape" of a new group is its members, that of a
# backward the number of weights of the wrapped model, that of a wrapped model the number and the size of its buffers.
SAME_SHAPES = frozenset(
    (
        "all_reduce broadcast reduce all_gather all_gather_single reduce_scatter reduce_scatter_single new_group "
        "backward DistributedDataParallel"
    ).split()
)
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
# Marks of a step of DistributedDataParallel; neither is a collective. `backward` stands for the collectives that torch
# makes in it, where the Flight Recorder is lost.
FORWARD = "forward"
BACKWARD = "backward"
MARKS = frozenset({FORWARD, BACKWARD})
WRAPPED = "DistributedDataParallel"  # a model is wrapped, which all ranks of the group do together
POINT_TO_POINT = frozenset({"send", "recv", "recv_any"})


class RankLog(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one rank, oldest first.

    `complete` is that it holds the calls that torch made in C++ as well; a rank that was killed leaves only the calls
    made from Python. `dropped` is how many older calls were overwritten.
    """

    rank: int
    pid: int
    world_size: int = 0
    calls: tuple[Collective, ...] = ()
    complete: bool = False
    dropped: int = 0


class HandledException(msgspec.Struct, frozen=True, kw_only=True):
    """An exception that a rank handled when it made a call: in an `except`, a `finally` or the end of a `with`.

    `frames` are those of its traceback, innermost first. `time` is that of the call.
    """

    kind: str
    text: str
    frames: tuple[StackFrame, ...]
    time: float


class Leaving(msgspec.Struct, frozen=True, kw_only=True):
    """The first line at which a rank left the job by itself: `sys.exit()` or `destroy_process_group()`.

    `handled` is the exception that it handled there. `has_failed`: the exit status was not 0.
    """

    how: str
    frame: StackFrame
    handled: HandledException | None = None
    has_failed: bool = False


class RemoteRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank on another host, as it told of itself at a time (in seconds since the epoch, by its own clock).

    `folder` is its working folder there.
    """

    log: RankLog
    folder: str = ""
    fate: Fate = "running"
    time: float = 0.0


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a job as the parent sees it.

    `at` are the user's frames of its main thread when it was asked, innermost first. `signal` is what it died of.
    `updates` is how many updates of the weights it has made, `micro_steps` how many backwards it usually makes for
    one of them, `moved` the time of the last entry in its black box.
    `skipped` is the line of a forward that no backward followed, though one follows on this rank as a rule.
    `raised` is the time of an exception of its own, not of one that only tells of the loss of another rank. `seen` is
    the last place in its black box before the first such exception of the job. `handles` is the exception that it
    handled when it made its last call. `logged` is the line that logged the value which its last call exchanges. `left`
    is where it left the job by itself. `dealt` is the line that takes batches of a DistributedSampler, which deals out
    equally many to all ranks, `stream` the `__iter__` of an IterableDataset that its batches come from.
    """

    rank: int
    fate: Fate = "unknown"
    log: RankLog | None = None
    at: tuple[StackFrame, ...] = ()
    signal: str = ""
    updates: int = 0
    micro_steps: int = 0
    moved: float = 0.0
    skipped: StackFrame | None = None
    raised: float = 0.0
    seen: StackFrame | None = None
    handles: HandledException | None = None
    logged: StackFrame | None = None
    left: Leaving | None = None
    dealt: StackFrame | None = None
    stream: StackFrame | None = None


# extra: a call that the others do not make. missing: one that they make. content: the same call with other contents.
# other: another call than theirs. stopped: no further call.
DifferenceKind = Literal["extra", "missing", "content", "other", "stopped"]

FoundBy = Literal["majority", "habit", "insertion", "end", "branch", "loop", "test", "exception", "nothing"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first call in which ranks differ.

    `call` is what the culprits called (None if nothing), `expected` what the others called. `before` is the last call
    that all had in common, `index` its successor's place in the logs. `by` tells how the culprits were found.
    `usual` is how often all ranks had made the expected call before.
    """

    kind: DifferenceKind
    group: str
    culprits: tuple[int, ...]
    others: tuple[int, ...]
    call: Collective | None
    expected: Collective | None
    before: Collective | None
    index: int
    by: FoundBy
    usual: int = 0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of a job that stands still or has failed, by rank.

    `difference` is where their logs first differ, `unmatched` the last `send` or `recv` of ranks that wait in vain
    for a partner. `still` is for how many seconds the job has stood still; 0 if it has ended.
    """

    world_size: int
    ranks: tuple[RankState, ...]
    difference: Difference | None = None
    unmatched: tuple[tuple[int, Collective], ...] = ()
    step: int | None = None
    still: float = 0.0

    @property
    def step_number(self) -> int | None:
        return self.step

    @property
    def rank(self) -> int:
        """The rank that the diagnosis is about."""
        if self.difference is not None and self.difference.culprits:
            return self.difference.culprits[0]
        return self.unmatched[0][0] if self.unmatched else 0

    def of(self, rank: int) -> RankState | None:
        return next((state for state in self.ranks if state.rank == rank), None)
