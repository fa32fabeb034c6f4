"""Samples of the host's memory -> an alarm, if memory ends within seconds or the host hardly gets on.

Much use alone is no alarm: a run may need nearly all there is, and get on well.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchmedic.memory_records import comparable
from torchmedic.records import MemorySample

_FULL = 0.85  # of the limit: less is nobody's trouble
_BRIM = 0.97
_SOON = 30.0  # seconds
_SPAN = 2.0  # seconds over which a rate means something,
WINDOW = 10.0  # and how far back it is taken from
_RISE = 0.02  # of the limit that must have come in that time
_STANDSTILL = 25.0  # percent of the time in which nobody got on for want of memory


def seconds_left(samples: Sequence[MemorySample]) -> float | None:
    """Until memory ends at the rate of the last seconds; None if it does not, or if too little is known."""
    last = samples[-1]
    recent = comparable(samples, WINDOW)
    if len(recent) < 3 or last.used is None or not last.limit or last.time - recent[0].time < _SPAN:
        return None
    first = recent[0].used or 0
    half = (recent[0].time + last.time) / 2  # by time: the last of them lie closer together
    middle = next(each.used or 0 for each in recent if each.time >= half)
    if last.used - first < _RISE * last.limit or last.used - middle < 0.25 * (last.used - first):
        return None  # it does not grow, or has stopped to
    rate = (last.used - first) / (last.time - recent[0].time)
    return max(0.0, (last.limit - last.used) / rate)


def is_alarming(samples: Sequence[MemorySample]) -> bool:
    last = samples[-1]
    if last.share < _FULL:
        return False
    left = seconds_left(samples)
    if left is not None and (left < _SOON or last.share > _BRIM):
        return True
    return (
        len(samples) > 2
        and all((each.waiting or 0.0) >= _STANDSTILL for each in samples[-3:])
        and (last.bound == "cgroup" or bool(last.swap_in) or last.share > _BRIM)
    )


def grew_most(samples: Sequence[MemorySample]) -> tuple[int, int] | None:
    """The process of the run that has grown most over the samples, and by how many bytes."""
    last = samples[-1]
    first = next((each for each in samples if each.time >= last.time - WINDOW), last)
    rises = {pid: size - first.private.get(pid, 0) for pid, size in last.private.items()}
    pid = max(rises, key=lambda each: rises[each], default=None)
    return (pid, rises[pid]) if pid is not None and rises[pid] > 0 else None
