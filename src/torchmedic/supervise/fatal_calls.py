"""The last call of a rank that only torch's Flight Recorder knows, which is lost with the process."""

from __future__ import annotations

from pathlib import Path

import msgspec

from torchmedic.detect.failures.death import read_stacks
from torchmedic.observe.ranks.call_site import MAX_USER_FRAMES
from torchmedic.records.ranks import Collective, RankLog, RankState
from torchmedic.runfolder import files
from torchmedic.source.branches import callees_at
from torchmedic.source.user_code import is_user_file

_FUNCTIONAL = "torch/distributed/_functional_collectives.py"


def with_fatal_call(run: Path, state: RankState, states: list[RankState]) -> RankState:
    """The state of a rank that died in a functional collective, such as those of DTensor, with this call in its log.

    Only the Flight Recorder knows such calls, and it is lost with its process. The stack at the death shows the last.
    """
    log, path = state.log, files.stack_files(run).get(state.log.pid) if state.log is not None else None
    if log is not None and log.complete and not all(each.log is None or each.log.complete for each in states):
        return msgspec.structs.replace(state, log=_with_last_call(log))
    if log is None or log.complete or state.fate != "died" or path is None:
        return state
    for thread in read_stacks(path)[1]:
        inner = next((each for each in thread.frames if each.file.endswith(_FUNCTIONAL)), None)
        users = tuple(each for each in thread.frames if is_user_file(each.file))[:MAX_USER_FRAMES]
        if inner is None or not users:
            continue
        made = callees_at(users[0].file, users[0].line) if "wait" in inner.function else ()
        name = next(iter(made)) if len(made) == 1 else inner.function
        call = Collective(op=name, frames=users, time=log.calls[-1].time if log.calls else 0.0)
        known = (each for other in states if other.log is not None for each in other.log.calls)
        if all(each.site != call.site for each in known if each.time >= call.time):  # else others make it now, too
            at = msgspec.structs.replace(log, calls=(*log.calls, call))
            return msgspec.structs.replace(state, log=at)
    return state


def _with_last_call(log: RankLog) -> RankLog:
    """The log with its last call as one from Python, if neither DistributedDataParallel nor the ring knows its lines.

    Beside a log without calls from C++ it counts all the same: no rank has met this one there.
    """
    last = log.calls[-1] if log.calls else None
    known = {call.site for call in log.calls if not call.native}
    if last is None or not last.native or last.site in known:
        return log
    return msgspec.structs.replace(log, calls=(*log.calls[:-1], msgspec.structs.replace(last, native=False)))
