"""Memory of the host: limits, samples, holders, and an alarm. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec


class MemoryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The memory limits of the run's cgroups. None where there is no value.

    `oom_kills` is of the innermost cgroup. All other values are of the cgroup with the lowest limit, which may be an
    ancestor. `hits` counts how often the limit was reached.
    """

    oom_kills: int | None = None
    limit: int | None = None
    high: int | None = None
    peak: int | None = None
    hits: int | None = None


class MemorySample(msgspec.Struct, frozen=True, kw_only=True):
    """The host's memory at one moment, as the parent sees it. None where a value cannot be read.

    `limit` is the nearest limit, of the host or of the run's cgroup; `used` is the part that cannot be reclaimed at
    once. `private` is the private memory of each process of the run, by pid; pages that a forked child still shares
    with its parent count for both. `waiting` is the percentage of the last ten seconds in which all tasks waited for
    memory, `swap_in` is in bytes per second.
    """

    time: float
    used: int | None = None
    limit: int | None = None
    bound: Literal["host", "cgroup"] = "host"
    private: dict[int, int] = msgspec.field(default_factory=dict)
    waiting: float | None = None
    swap_in: float | None = None
    shm_used: int | None = None
    shm_size: int | None = None

    @property
    def share(self) -> float:
        """The used share of the limit, from 0 to 1."""
        return self.used / self.limit if self.used is not None and self.limit else 0.0


class HeldMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one of the user's holders at the last look into the process, and the line that fills it."""

    name: str
    nbytes: int
    items: int = 0
    file: str = ""
    line: int = 0


def comparable(samples: Sequence[MemorySample], seconds: float) -> list[MemorySample]:
    """The samples of the last seconds that are about the same limit."""
    last = samples[-1] if samples else None
    return [
        each
        for each in samples
        if last is not None
        and (each.limit, each.bound) == (last.limit, last.bound)
        and each.used is not None
        and each.time >= last.time - seconds
    ]


class HostAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """The host's memory is about to run out during the run.

    `seconds_left` is None if memory does not run out soon, but the host makes little progress because memory is short.
    `growing` is the process of the run that has grown most, and by how many bytes; it `trains`, or `loads` data for a
    process that does. `together` is the growth of all growing processes, `alike` the number of those that grew about as
    much as that one. `size_when_told` is the memory of the growing process when it told its `holders`, None if that
    is not known. `step`, `file` and `line` are the current place of the training.
    """

    samples: tuple[MemorySample, ...]
    seconds_left: float | None
    growing: tuple[int, int] | None = None
    trains: bool = False
    loads: bool = False
    together: int = 0
    alike: int = 1
    holders: tuple[HeldMemory, ...] = ()
    size_when_told: int | None = None
    pinned: int = 0
    rank: int = 0
    step: int | None = None
    file: str = ""
    line: int = 0

    @property
    def step_number(self) -> int | None:
        return self.step

    @property
    def last(self) -> MemorySample:
        return self.samples[-1]
