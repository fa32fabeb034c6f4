"""Host memory is about to run out: the kernel will kill the run, or the machine will freeze.

What: the memory of the machine, or the limit of the container or job, is nearly used up and will run out within seconds
at the current rate; or all processes wait for memory most of the time, because the pages that they need have been
swapped out. No process has been killed yet.

Why: host memory, not GPU memory. Tensors that are kept over steps, results that are collected, a dataset that every
DataLoader worker copies page by page as it reads it, batches that wait in a queue, another program.

Cure: stop the run while that is possible, then use less memory: keep numbers instead of tensors, use fewer workers or a
smaller `prefetch_factor`, memory-map the data or keep it in arrays instead of Python objects, or request a job with
more memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchmedic.detect.trends.host_memory import WINDOW
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.format import size
from torchmedic.records.memory import HeldMemory, HostAlarm, comparable

_MIN_OWN_SHARE = 0.5  # share of what came lately, from which on the run itself is to blame
_MIN_PROCESS_SHARE = 0.25  # share of what a process holds, from which on one of its holders is to blame
_MIN_HOLDER_SHARE = 0.02  # share of the limit, from which on a holder is named


class _Rise(NamedTuple):
    """By how many bytes memory rose lately, over how many seconds, and whose rise it was."""

    nbytes: int
    shared: int  # of it in /dev/shm
    seconds: float
    is_blamed: bool  # the run itself
    in_shm: bool  # mostly in /dev/shm, and the run is not known to be to blame


@rule("TM455", "host-memory-running-out")
def check(alarm: HostAlarm) -> Draft | None:
    last = alarm.last
    if last.used is None or last.limit is None:
        return None
    kind = "the memory limit of the run's cgroup" if last.bound == "cgroup" else "the memory of this host"
    if alarm.seconds_left is not None:
        when = f"memory ends in about {max(1, round(alarm.seconds_left))} s at this rate"
        message = f"{size(last.used)} of {size(last.limit)} are used, and {when}"
    else:
        message = f"all processes wait for memory {last.waiting:.0f} % of the time"
    rise = _rise(alarm, last.used)
    blamed, in_shm = rise.is_blamed, rise.in_shm
    draft = check.draft(alarm, "likely" if blamed or in_shm else "possible")
    draft.message = message
    draft.cause = f"{kind} is nearly used up{_since(alarm, rise.shared if in_shm else 0, blamed=blamed)}"
    top = _top(alarm, blamed=blamed, in_shm=in_shm)
    if top is not None and top.file:
        label = f"`{top.name}` is filled here and holds {size(top.nbytes)}"
        draft.at(line_location("cause", top.file, top.line, label))
    elif alarm.file:
        draft.at(line_location("cause", alarm.file, alarm.line, "training is here"))
    draft.because(*_facts(alarm, rise, last.limit))
    draft.help(_advice(alarm, top, blamed=blamed, in_shm=in_shm))
    return draft.rated("warning")


def _rise(alarm: HostAlarm, used: int) -> _Rise:
    first, last = comparable(alarm.samples, WINDOW)[0], alarm.last
    nbytes = used - (first.used or 0)
    shared = (last.shm_used or 0) - (first.shm_used or 0)
    grown = max(alarm.together, alarm.growing[1]) if alarm.growing is not None else 0
    blamed = alarm.growing is not None and nbytes > 0 and grown >= _MIN_OWN_SHARE * nbytes
    in_shm = not blamed and nbytes > 0 and shared >= _MIN_OWN_SHARE * nbytes
    return _Rise(nbytes, shared, last.time - first.time, blamed, in_shm)


def _facts(alarm: HostAlarm, rise: _Rise, limit: int) -> Iterator[str]:
    """The use of the memory: its rise, and the processes and holders that have it."""
    last = alarm.last
    if rise.seconds > 1:
        yield f"that is {size(max(0, rise.nbytes))} more than {rise.seconds:.0f} s before"
    total = sum(last.private.values())
    count = len(last.private)
    if total:
        who = "the process of the run holds" if count == 1 else f"{count} processes of the run hold"
        yield f"{who} {size(total)} for {'itself' if count == 1 else 'themselves'}"
    for held in alarm.holders[:3]:
        if held.nbytes >= _MIN_HOLDER_SHARE * limit:
            items = f" in {held.items} items" if held.items else ""
            yield f"`{held.name}` holds {size(held.nbytes)}{items}"
    if last.swap_in:
        yield f"{size(int(last.swap_in))} a second are read back from swap"
    if last.shm_used and last.shm_size and last.shm_used > limit // 10:
        yield f"/dev/shm takes {size(last.shm_used)} of it"
    if alarm.pinned > limit // 10:
        yield f"{size(alarm.pinned)} are pinned for the GPU and cannot be swapped out"


def _top(alarm: HostAlarm, *, blamed: bool, in_shm: bool) -> HeldMemory | None:
    """The holder of a good part of the process that has grown."""
    found = next(iter(alarm.holders), None)
    if found is None or alarm.growing is None or not (blamed or in_shm):
        return None
    own = alarm.last.private.get(alarm.growing[0], 0) if blamed else alarm.last.shm_used or 0
    if blamed and alarm.size_when_told is not None:
        own = alarm.size_when_told
    return found if found.nbytes >= min(_MIN_PROCESS_SHARE * own, _MIN_OWN_SHARE * alarm.growing[1]) else None


def _since(alarm: HostAlarm, shared: int, *, blamed: bool) -> str:
    if shared:
        return f"; what lies in /dev/shm has grown by {size(shared)} in the last seconds"
    if alarm.growing is None or not blamed:
        return ", mostly by others than the processes of this run"
    pid, rise = alarm.growing
    if alarm.alike > 1:
        who = f"{alarm.alike} DataLoader workers" if alarm.loads else f"{alarm.alike} processes of the run"
        return f"; {who} have grown by {size(alarm.together)} together in the last seconds"
    who = f"process {pid}, which the script has started,"
    if alarm.trains:
        who = "the training process" if alarm.step else "the process of the script"
    elif alarm.loads:
        who = f"a DataLoader worker (process {pid})"
    return f"; {who} has grown by {size(rise)} in the last seconds"


def _advice(alarm: HostAlarm, top: HeldMemory | None, *, blamed: bool, in_shm: bool) -> str:
    if top is not None:
        own = ", and use fewer workers: each has one of its own" if alarm.loads and alarm.alike > 1 else ""
        return f"keep less in `{top.name}`: numbers, detached tensors, or only the last items{own}"
    if blamed and alarm.loads:
        return "use fewer DataLoader workers, a smaller `prefetch_factor`, or data in arrays instead of objects"
    if blamed and not alarm.trains:
        return f"have process {alarm.growing[0] if alarm.growing else 0} keep less, or hand on what it makes in parts"
    if in_shm:
        return "keep fewer tensors that are shared between processes: batches of workers lie in /dev/shm until they go"
    return "use a smaller batch, fewer workers, mapped instead of loaded data, or a job with more memory"
