"""A rank that is slow but moves: it comes last to the meetings of all ranks, and the others wait for it."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchmedic.detect.ranks.alignment import first_difference
from torchmedic.detect.ranks.comparable import by_group
from torchmedic.records import Moment, Phase
from torchmedic.records.ranks import Collective, RankLog

_MIN_MEETINGS = 20
_MIN_LATE = 0.9  # share of the meetings to which the same rank comes last
_MIN_SHARE = 0.4  # share of a step for which the others wait
_MIN_WAIT_SECONDS = 0.05
_MIN_TOTAL_SECONDS = 2.0
_MIN_PHASE_SHARE = 0.6  # share of the wait that one phase explains
_LIVE_FACTOR = 4  # a run that goes on must show so much more: its first steps may not be like the rest


class Straggler(NamedTuple):
    """A slow rank. `wait` and `step` are seconds, as medians over the meetings."""

    rank: int
    late: int
    meetings: int
    wait: float
    step: float
    call: Collective
    before: Collective | None


def find_straggler(logs: Sequence[RankLog], *, ended: bool) -> Straggler | None:
    """The rank that others wait for in nearly every step; None if no rank stands out.

    All ranks leave a collective together. So the first collective of a step shows who needed longest to come there: the
    call whose line is the most frequent one, after the longest pauses. While the run goes on, the calls that torch
    makes itself are not known, and backwards stand for them.
    """
    logs = sorted(logs, key=lambda log: log.rank)
    streams = _common(logs)
    if len(streams) < 2:
        return None
    length = len(streams[0])
    opening = _opening(streams[0])
    if opening is None:
        return None
    places = [at for at in range(1, length) if streams[0][at].site == opening]
    factor = 1 if ended else _LIVE_FACTOR
    if len(places) < factor * _MIN_MEETINGS:
        return None
    arrivals = [[stream[at].time for stream in streams] for at in places]
    last = Counter(times.index(max(times)) for times in arrivals)
    slow, late = last.most_common(1)[0]
    waits = [times[slow] - statistics.median(each for at, each in enumerate(times) if at != slow) for times in arrivals]
    steps = [after[slow] - before[slow] for before, after in itertools.pairwise(arrivals)]
    wait, step = statistics.median(waits), statistics.median(steps)
    met = sum(min(after) >= before[slow] for before, after in itertools.pairwise(arrivals))
    if met < _MIN_LATE * len(steps):
        return None  # the others went on without the slow rank: nobody waits in this call
    enough = late >= _MIN_LATE * len(places) and wait >= max(_MIN_WAIT_SECONDS, _MIN_SHARE * step)
    if not enough or wait * len(places) < factor * _MIN_TOTAL_SECONDS:
        return None
    at = places[-1]
    return Straggler(logs[slow].rank, late, len(places), wait, step, streams[slow][at], streams[slow][at - 1])


def slow_phase(moments: Mapping[int, Sequence[Moment]], found: Straggler) -> tuple[Moment, float] | None:
    """The phase of a step in which the slow rank loses most of the time, and the seconds that a step spends in it.

    Phases in which a rank waits for others are longer on the other ranks.
    """
    spent = {rank: _seconds_by_phase(each) for rank, each in moments.items()}
    own, others = spent.get(found.rank, {}), [each for rank, each in spent.items() if rank != found.rank]
    if not own or not others:
        return None
    lost = {phase: seconds - max(each.get(phase, 0.0) for each in others) for phase, seconds in own.items()}
    phase = max(lost, key=lambda each: lost[each])
    if phase == "other" or lost[phase] < _MIN_PHASE_SHARE * found.wait:
        return None
    return next(each for each in reversed(moments[found.rank]) if each.phase == phase), own[phase]


def _seconds_by_phase(moments: Sequence[Moment]) -> dict[Phase, float]:
    """The seconds of a usual step by phase: medians over the steps that the black box still holds whole."""
    steps: dict[int, dict[Phase, float]] = {}
    for moment, after in itertools.pairwise(moments):
        row = steps.setdefault(moment.updates, {})
        row[moment.phase] = row.get(moment.phase, 0.0) + after.time - moment.time
    whole = list(steps.values())[1:-1]
    phases = {phase for row in whole for phase in row}
    return {phase: statistics.median(row.get(phase, 0.0) for row in whole) for phase in phases}


def _common(logs: Sequence[RankLog]) -> list[list[Collective]]:
    """The calls of all ranks in the world's group, as far as all have come and kept them; nothing if they differ."""
    streams = list(by_group(logs).get("0", {}).values())
    length = min(map(len, streams), default=0)
    if not length or len(streams) < len(logs):
        return []
    if all(log.complete for log in logs):  # the Flight Recorder keeps the last calls
        return [each[-length:] for each in streams] if first_difference(logs) is None else []
    cut = [each[:length] for each in streams]  # the rings of ranks that go on are read at different moments
    return cut if len({tuple(call.content for call in stream) for stream in cut}) == 1 else []


def _opening(calls: Sequence[Collective]) -> tuple[tuple[str, int], ...] | None:
    """The call site that follows the longest pauses: the first collective of a step."""
    pauses: dict[tuple[tuple[str, int], ...], list[float]] = {}
    for before, call in itertools.pairwise(calls):
        pauses.setdefault(call.site, []).append(call.time - before.time)
    frequent = {site: found for site, found in pauses.items() if len(found) >= _MIN_MEETINGS}
    return max(frequent, key=lambda site: statistics.median(frequent[site]), default=None)
