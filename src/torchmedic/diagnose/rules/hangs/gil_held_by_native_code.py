"""A native call holds Python's global interpreter lock (GIL).

What: a thread is inside compiled code that has not released the GIL. No other Python thread can run in the meantime: no
logging, no heartbeat, no signal handler, no Ctrl-C.

Why: an extension or a `ctypes.PyDLL` function that works or waits without releasing the GIL, a regular expression with
catastrophic backtracking, one very large call of a builtin (`sum`, `sorted`, `int`, `json.loads`). At the end of a job
of several ranks, a model in DistributedDataParallel that is freed after `destroy_process_group()` can wait for a thread
of torch that needs the GIL.

Cure: check the call: limit it, split it, or run it in a separate process. Use `ctypes.CDLL`, which releases the GIL,
and `py::call_guard<py::gil_scoped_release>` or `Py_BEGIN_ALLOW_THREADS` in extensions.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.stall import BUSY, at, main_line, stall_rule
from torchmedic.records.inside import InsideView, PyThread
from torchmedic.records.process import ProcessView, ThreadView
from torchmedic.records.stall import Stall
from torchmedic.source.branches import call_in_called

_LONG_CALL_SECONDS = 60.0  # and
_LONG_CALL_LIMITS = 10  # times the limit, after which this is not just one long call
_MIN_STARVED_DEMAND = 0.3  # of a core, that our thread wants and does not get
_MIN_SHARE_OF_CORE = 0.1
_MIN_TURNS = 8  # turns on a core in which our thread would have had the GIL, had it been free
_MIN_WAKES_PER_SECOND = 50.0  # a thread that waits for the GIL asks again every five milliseconds
_LEAVES = "destroy_process_group"
_MIN_WORK_SECONDS_PER_WAKE = 0.0002  # a thread that only asks for the GIL works less


@stall_rule("TM501", "gil-held-by-native-code")
def check(stall: Stall) -> Draft | None:
    for pid in stall.mute:
        process, view = stall.process(pid), stall.inside.get(pid)
        if process is None or process.state in "TtZXD" or (pid != stall.pid and not _main_is_idle(stall)):
            continue
        if _is_starved(process):
            continue
        holder = _holder(process, view)
        if holder is not None and not _has_no_core(process.thread(holder.tid)):
            return _told(stall, process, holder)
    return None


def _is_starved(process: ProcessView) -> bool:
    """Whether our thread did not answer because it was given no core, or not enough: that says nothing of the GIL.

    On a machine that is taken, it waits for a core each time that it wants to ask for the GIL again.
    """
    ours = process.listener
    if ours is not None and _works(ours):
        return True  # it has the GIL, and is still busy with the question before
    if ours is None or (ours.demand or 0.0) <= _MIN_STARVED_DEMAND or (ours.busy or 0.0) >= (ours.demand or 0.0) / 2:
        return False
    return (ours.wakes or 0.0) * process.elapsed < _MIN_TURNS


def _has_no_core(row: ThreadView | None) -> bool:
    """Whether a thread hardly ran and wants to: it may hold the GIL, but what it lacks is a core."""
    return row is not None and row.state == "R" and (row.busy or 0.0) < _MIN_SHARE_OF_CORE


def _main_is_idle(stall: Stall) -> bool:
    return stall.view is not None and stall.view.demand < BUSY


def _holder(process: ProcessView, view: InsideView | None) -> PyThread | None:
    """The thread of Python that is at work in the kernel's eyes, or the one that does not even ask for the GIL."""
    ours = process.listener.tid if process.listener is not None else None
    known = [each for each in (view.threads if view is not None else ()) if each.frames and each.tid != ours]
    if owners := [thread for thread in known if thread.holds_gil]:
        return owners[0]  # py-spy knows
    seen = {thread.tid: process.thread(thread.tid) for thread in known if thread.tid}
    at_work = [each for each in known if (row := seen.get(each.tid)) is not None and _works(row)]
    if at_work:
        used = {row.tid: row.busy or 0.0 for row in process.threads}
        return max(at_work, key=lambda each: used.get(each.tid, 0.0))
    quiet = [
        each for each in known if (row := seen.get(each.tid)) is not None and (row.wakes or 0.0) < _MIN_WAKES_PER_SECOND
    ]
    if len(quiet) > 1:
        quiet = [each for each in quiet if not _asks(process, seen[each.tid])]
    if len(quiet) == 1 or len(known) == 1:
        return (quiet or known)[0]
    return None


def _works(row: ThreadView) -> bool:
    """Whether a thread computes. One that only waits for a core to ask for the GIL needs next to nothing per turn."""
    return (row.demand or 0.0) > BUSY and (row.busy or 0.0) > _MIN_WORK_SECONDS_PER_WAKE * (row.wakes or 0.0)


def _asks(process: ProcessView, row: ThreadView | None) -> bool:
    """Whether a thread may be waiting for the GIL, which is always for some milliseconds, or for a core to ask on."""
    if row is None or row.state == "R":
        return True
    return any(wait.tid == row.tid and wait.timed for wait in process.futexes)


def _told(stall: Stall, process: ProcessView, holder: PyThread) -> Draft:
    row = process.thread(holder.tid)
    at_work = row is not None and _works(row)
    how = "is at work" if at_work else "waits"
    frame = holder.user_frame or holder.frames[0]
    others = "the main thread and all others wait" if not holder.main else "no other thread can run"
    draft = check.draft(stall, "likely")
    draft.message = f"a native call {how} and holds Python's GIL"
    draft.cause = f"this call does not release the GIL, so {others}"
    over = call_in_called(frame.file, frame.line, _LEAVES) if holder.frames[0] is frame and not at_work else None
    if over is not None:
        draft.at(line_location("cause", frame.file, over[1], "the group ends here, before the model is freed"))
    draft.at(at(frame, "cause" if over is None else "surfaced", f"this call {how} and holds the GIL"))
    if not holder.main:
        draft.at(main_line(stall, label="the main thread waits here for the GIL"))
    draft.because(
        "it held the GIL at every check, while other threads kept requesting it"
        if stall.attached
        else "the process did not answer: the thread of torchmedic inside it needs the GIL"
    )
    if row is not None:
        draft.because(f"thread {row.tid}: state {row.state}, {row.busy or 0:.0%} of a core")
    if holder.frames[0] is not frame:
        draft.because(f"the last Python function is `{holder.frames[0].function}`")
    if over is not None:
        return _freed_after_group(draft, over[0])
    draft.help("limit or split this call, or run it in a separate process")
    ends = at_work or (row is not None and row.wakes_in is not None)  # by itself, perhaps
    for_good = not ends or stall.still > max(_LONG_CALL_SECONDS, _LONG_CALL_LIMITS * stall.limit)
    return draft.rated("error" if for_good else "warning")


def _freed_after_group(draft: Draft, name: str) -> Draft:
    """A line calls a function of the script, and no frame of that function is left: what it held is being freed."""
    draft.message = f"the end of `{name}` waits and holds Python's GIL, after `{_LEAVES}()`"
    draft.cause = (
        "a model in DistributedDataParallel that is freed after the end of its group can wait for a thread of torch, "
        "which needs the GIL"
    )
    draft.because(f"`{name}` has no frame any more: its variables are being freed")
    return draft.help(
        f"free the model first: `del` every variable that holds the model or its loss, then `{_LEAVES}()`"
    )
