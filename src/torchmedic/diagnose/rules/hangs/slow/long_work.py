"""The run is doing work that takes long; it is not hung.

What: no step ends, but the main thread moves from line to line, or it is inside one native call that keeps a core busy,
or it waits for a thread or a process that is working.

Why: preparing data, tokenizing, a large decomposition or search, evaluation, loading weights: work that is not a
training step.

Cure: none needed. The diagnosis shows the line, the time so far and the CPU usage. A native call that does not return
for very long may still be in an endless loop: py-spy (`pip install torchmedic[py-spy]`) then shows what it does.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._at_work import (
    MOVING,
    demand,
    frames_in,
    helpers,
    native,
    receives,
    share,
    very_long,
    waits_for_workers,
    where,
)
from torchmedic.diagnose.words.format import duration, size
from torchmedic.diagnose.words.stall import BUSY, IDLE, at, main_line, stall_rule, stands
from torchmedic.records import Severity
from torchmedic.records.stall import Stall

_IMPORT_LIMITS = 4  # times the limit: until then to import modules is nothing to speak of


@stall_rule("TM558", "long-work")
def check(stall: Stall) -> Draft | None:
    main, inner, view = stall.thread, stall.inner, stall.view
    if main is None or inner is None or view is None:
        return None
    row = native(view, main)
    moved = max(view.bytes_read or 0.0, view.bytes_written or 0.0)
    if main.moved and (demand(row) > IDLE or inner.batches):
        imports = frames_in(main, "importlib._bootstrap") is not None
        if imports and stall.still < _IMPORT_LIMITS * stall.limit:
            return None
        steps = ", without a step" if not stall.attached or stall.box is not None else ""  # else nobody counts them
        cause = "modules are being imported" if imports else f"the main thread makes progress{steps}"
        return _told(stall, cause, f"{inner.batches} batches" if inner.batches else "")
    if stands(inner) and demand(row) > BUSY:
        long = very_long(stall)
        cause = f"one call has been at work in native code{', for very long' if long else ''}"
        return _told(stall, cause, "", "warning" if long else "note")
    if stands(inner) and not waits_for_workers(main) and moved > MOVING:
        return _told(stall, f"the main thread reads or writes {size(int(moved))} a second", "")
    if stands(inner) and not waits_for_workers(main) and receives(row):
        return _told(stall, "the main thread reads, and is given something now and then", "")
    if (
        view.demand > BUSY
        and stands(inner)
        and not very_long(stall)
        and frames_in(main, "threading.py", "concurrent/futures", "queue.py") is None
    ):
        return _told(stall, "threads of one native call are at work", "")
    return _helped(stall)


def _told(stall: Stall, cause: str, seen: str, severity: Severity = "note") -> Draft:
    draft = check.draft(stall, "likely", f"not hung: the run is at work, for {duration(stall.still)} so far", cause)
    main = stall.thread
    draft.at(main_line(stall, "cause", "the main thread is at work here"))
    used = share(native(stall.view, main))
    lines = sorted({line for line in main.lines if line}) if main is not None else []
    if len(lines) > 1:
        draft.because(f"seen at lines {', '.join(map(str, lines[:8]))}")
    draft.because(f"it uses {used}" if used else "", f"{seen} arrived during the examination" if seen else "")
    return draft.rated(severity)


def _helped(stall: Stall) -> Draft | None:
    for helper in helpers(stall):
        if helper.sleeps is None:
            draft = check.draft(stall, "likely" if helper.known else "possible")
            draft.message = (
                f"not hung: the run waits for a working thread or process, for {duration(stall.still)} so far"
            )
            draft.cause = where(helper)
            draft.at(at(helper.frame, "cause", f"{helper.name} is at work here"))
            draft.at(
                main_line(stall, "surfaced" if helper.frame is not None else "cause", "the main thread waits here")
            )
            return draft.rated("note")
    return None
