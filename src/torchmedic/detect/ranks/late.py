"""A rank that gave up in a call, because another rank did not come to this call in time."""

from __future__ import annotations

from typing import NamedTuple

from torchmedic.records.ranks import MARKS, Collective, Job, RankLog, RankState

_WORLD = "0"  # the group of all ranks
_MIN_WAIT_SECONDS = 1.0  # no group has a shorter timeout


class GaveUp(NamedTuple):
    """The first rank with an exception, which came out of a call, and the ranks that had not come to this call."""

    state: RankState
    call: Collective
    waited: float
    late: tuple[RankState, ...]


def gave_up(job: Job) -> GaveUp | None:
    """The wait that ended in an exception while all connections were open; None if there is none.

    Then only the timeout of the group can have ended it.
    """
    first = min((state for state in job.ranks if state.raised), key=lambda state: state.raised, default=None)
    calls = _calls(first.log) if first is not None and first.log is not None else []
    if first is None or not calls or first.raised - calls[-1].time < _MIN_WAIT_SECONDS:
        return None
    call = calls[-1]
    late = tuple(
        state
        for state in job.ranks
        if state is not first and state.log is not None and _is_late(state.log, call, first.raised)
    )
    return GaveUp(first, call, first.raised - call.time, late) if late else None


def _calls(log: RankLog) -> list[Collective]:
    return [call for call in log.calls if call.op not in MARKS]  # which are counted apart


def _is_late(log: RankLog, call: Collective, at: float) -> bool:
    """Whether a rank takes part in a call, and had not made it by a time."""
    same = [each for each in _calls(log) if (each.group, each.native) == (call.group, call.native)]
    if (not same and call.group != _WORLD) or (call.native and not log.complete):
        return False  # it is no member of the group, or its calls are not known
    return not any(each.ordinal >= call.ordinal and each.time <= at for each in same)
