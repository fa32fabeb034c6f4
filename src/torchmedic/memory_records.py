"""An alarm about the host's memory, which goes from the parent to its rule. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from torchmedic.records import HeldMemory, MemorySample


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
    does. `step`, `file` and `line` are where training is.
    """

    samples: tuple[MemorySample, ...]
    seconds_left: float | None
    growing: tuple[int, int] | None = None
    trains: bool = False
    loads: bool = False
    holders: tuple[HeldMemory, ...] = ()
    pinned: int = 0
    rank: int = 0
    step: int | None = None
    file: str = ""
    line: int = 0

    @property
    def last(self) -> MemorySample:
        return self.samples[-1]
