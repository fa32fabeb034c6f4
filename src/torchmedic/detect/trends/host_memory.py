"""Samples of the host's memory -> an alarm, if memory ends within seconds or the host hardly makes progress.

Much use alone is no alarm: a run may need nearly all memory and make progress.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchmedic.records.memory import MemorySample, comparable

_MIN_TIGHT_SHARE, _MIN_ALARMING_SHARE = 0.7, 0.85  # shares of the limit
_FULL_SHARE = 0.97  # share of the limit
_SOON_SECONDS = 30.0
_MIN_SPAN_SECONDS = 2.0  # over which a rate means something
_MIN_SHORT_SPAN_SECONDS = 0.8  # enough where little time is left
_AT_ONCE_SECONDS = 3.0
WINDOW = 10.0  # and how far back it is taken from
_MIN_RISE = 0.02  # share of the limit that must have come in that time
_RUSHING_SECONDS = 8.0
_MAX_AMPLE_SHARE = 0.5  # share of the limit, and
_MIN_AMPLE_BYTES = 8 << 30  # of memory, and
_MIN_AMPLE_SHARED_BYTES = 1 << 30  # of shared memory, that no process fills between two samples
_MIN_MOVE = 0.005  # share of the limit that came in that time, where memory is not at rest
_WAITING_PERCENT, _STANDSTILL_PERCENT = 1.0, 25.0  # percent of the time in which all tasks waited for memory


def seconds_left(samples: Sequence[MemorySample]) -> float | None:
    """Seconds until memory ends at the rate of the last seconds; None if it does not, or if too little is known."""
    last = samples[-1]
    recent = comparable(samples, WINDOW)
    span = last.time - recent[0].time if recent else 0.0
    if len(recent) < 3 or last.used is None or not last.limit or span < _MIN_SHORT_SPAN_SECONDS:
        return None
    first = recent[0].used or 0
    half = (recent[0].time + last.time) / 2  # by time: the last of them lie closer together
    middle = next(each.used or 0 for each in recent if each.time >= half)
    if last.used - first < _MIN_RISE * last.limit or last.used - middle < 0.25 * (last.used - first):
        return None  # it does not grow, or has stopped to
    left = max(0.0, (last.limit - last.used) * span / (last.used - first))
    return left if span >= _MIN_SPAN_SECONDS or left < _AT_ONCE_SECONDS else None


def is_rushing(samples: Sequence[MemorySample]) -> bool:
    """Whether memory would end within seconds, by the last two samples: too little for an alarm, enough to look."""
    recent = comparable(samples, WINDOW)[-2:]
    if len(recent) < 2 or not recent[1].limit:
        return False
    rise = (recent[1].used or 0) - (recent[0].used or 0)
    left = recent[1].limit - (recent[1].used or 0)
    return rise > _MIN_RISE * recent[1].limit and left * (recent[1].time - recent[0].time) < _RUSHING_SECONDS * rise


def is_tight(samples: Sequence[MemorySample]) -> bool:
    """Whether the next sample should come soon: little is left, or it may soon be little."""
    last = samples[-1]
    if last.share < _MIN_TIGHT_SHARE:
        return is_rushing(samples)
    least = min(each.used or 0 for each in comparable(samples, WINDOW))
    is_moving = (last.used or 0) - least > _MIN_MOVE * (last.limit or 0)
    return last.share >= _MIN_ALARMING_SHARE or (last.waiting or 0.0) >= _WAITING_PERCENT or is_moving


def is_ample(last: MemorySample) -> bool:
    """Whether the next sample may come late: much is left."""
    free = (last.limit or 0) - (last.used or 0)
    is_shared_ample = last.shm_size is None or last.shm_size - (last.shm_used or 0) >= _MIN_AMPLE_SHARED_BYTES
    return last.share < _MAX_AMPLE_SHARE and free >= _MIN_AMPLE_BYTES and is_shared_ample


def is_alarming(samples: Sequence[MemorySample]) -> bool:
    last = samples[-1]
    if last.share < _MIN_ALARMING_SHARE:
        return False
    left = seconds_left(samples)
    if left is not None and (left < _SOON_SECONDS or last.share > _FULL_SHARE):
        return True
    return (
        len(samples) > 2
        and all((each.waiting or 0.0) >= _STANDSTILL_PERCENT for each in samples[-3:])
        and (last.bound == "cgroup" or bool(last.swap_in) or last.share > _FULL_SHARE)
    )


def rises(samples: Sequence[MemorySample]) -> dict[int, int]:
    """By how many bytes each process of the run has grown over the samples, since it was first seen in them."""
    last = samples[-1]
    recent = [each for each in samples if each.time >= last.time - WINDOW]
    first = {pid: size for each in reversed(recent) for pid, size in each.private.items()}
    return {pid: size - first[pid] for pid, size in last.private.items()}


def grew_most(samples: Sequence[MemorySample]) -> tuple[int, int] | None:
    """The process of the run that has grown most over the samples, and by how many bytes."""
    grown = rises(samples)
    pid = max(grown, key=lambda each: grown[each], default=None)
    return (pid, grown[pid]) if pid is not None and grown[pid] > 0 else None
