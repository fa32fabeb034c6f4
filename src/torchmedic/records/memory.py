"""Memory of the host: its limits, samples of it, who holds it, and an alarm. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec


class MemoryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the cgroups of the run say of memory. None where they do not say.

    `oom_kills` is of the innermost group; the rest is of the group, that one or one around it, that has the lowest
    limit. `hits` counts how often it was reached.
    """

    oom_kills: int | None = None
    limit: int | None = None
    high: int | None = None
    peak: int | None = None
    hits: int | None = None


class MemorySample(msgspec.Struct, frozen=True, kw_only=True):
    """The host's memory at one moment, as the parent sees it. None where that cannot be read.

    `used` is what cannot be given back at once, of the `limit` that is nearest: that of the host, or of the run's
    cgroup. `private` is what each process of the run holds for itself, by its number; pages that a forked child still
    shares with its parent count for both. `waiting` is the share of the last ten seconds in percent in which all tasks
    waited for memory, `swap_in` bytes per second.
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
        """Of the limit, from 0 to 1."""
        return self.used / self.limit if self.used is not None and self.limit else 0.0


class HeldMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one holder of the user's held at the last look into the process, and the line that fills it."""

    name: str
    nbytes: int
    items: int = 0
    file: str = ""
    line: int = 0


def comparable(samples: Sequence[MemorySample], seconds: float) -> list[MemorySample]:
    """The last seconds, as far as they are about the same limit."""
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
    """Memory of the host is about to end, while the run still goes on.

    `seconds_left` is None where memory does not run out soon but the host hardly gets on for want of it. `growing` is
    the process of the run that has grown most in this time and by how much; it `trains`, or `loads` data for one that
    does. `together` is how much all processes of the run have grown that did, `alike` how many of them about as much
    as that one. `step`, `file` and `line` are where training is.
    """

    samples: tuple[MemorySample, ...]
    seconds_left: float | None
    growing: tuple[int, int] | None = None
    trains: bool = False
    loads: bool = False
    together: int = 0
    alike: int = 1
    holders: tuple[HeldMemory, ...] = ()
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
