"""The data arrives slowly; the run is not hung.

What: the main thread waits for the next batch, and the reader is working: a DataLoader worker, or the dataset itself if
there are no workers.

Why: items that take long (large files, slow or remote storage, heavy augmentation), too few workers, a first batch that
has to fill caches, one item that is much larger than the others.

Cure: the diagnosis shows the line, and the item if it is known. Use more workers and a larger `prefetch_factor`,
smaller or preprocessed files, `persistent_workers=True` if every epoch begins with a pause.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._at_work import FETCHING, MOVING, frames_in, waits_for_workers, works
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.format import duration, size
from torchmedic.diagnose.words.stall import at, main_line, stall_rule, who
from torchmedic.records import Role
from torchmedic.records.inside import InsideView, LoopView
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Stall


@stall_rule("TM555", "slow-data")
def check(stall: Stall) -> Draft | None:
    if waits_for_workers(stall.thread):
        for process in stall.processes:
            view = stall.inside.get(process.pid) or InsideView(pid=process.pid, time=0.0)
            if process.is_loader_worker:
                how = works(stall, process, view)
                if how:
                    return _told(stall, process, view, f"{who(process)} {how}")
        return None
    inner, own = stall.inner, stall.view
    if inner is None or own is None or frames_in(inner.main, FETCHING) is None:
        return None
    how = works(stall, own, inner)
    return _told(stall, own, inner, f"the main thread reads it and {how}") if how else None


def _loop_of_item(view: InsideView) -> LoopView | None:
    """The `while` loop that reads an item has been in since the first look."""
    loop, fetch = view.loop, frames_in(view.main, FETCHING)
    if view.main is None or fetch is None or loop is None or loop.kind != "while":
        return None
    inside = view.main.frames[: view.main.frames.index(fetch)]
    is_inside = any(each.file == loop.file and loop.line <= each.line <= loop.end_line for each in inside)
    return loop if is_inside else None


def _told(stall: Stall, process: ProcessView, view: InsideView, cause: str) -> Draft:
    item = f" item {view.item}" if view.item else ""
    loop, so_far = _loop_of_item(view), duration(stall.still)
    message = f"not hung: the next batch takes long, {so_far} so far"
    if loop is not None:
        message = f"the next batch takes long, {so_far} so far: the `while` loop that reads{item or ' it'} goes on"
    draft = check.draft(stall, "likely", message, cause)
    thread = view.main
    role: Role = "surfaced" if loop is not None else "cause"
    if loop is not None:
        draft.at(line_location("cause", loop.file, loop.line, f"does not end for{item or ' this item'}"))
        draft.help("limit the rounds of the loop, and raise an exception that names the item: it may have no way out")
    draft.at(at(thread.user_frame if thread is not None else None, role, f"reads{item or ' the data'} here"))
    known = loop is not None or (thread is not None and thread.user_frame is not None)
    draft.at(main_line(stall, "surfaced" if known else "cause", "the main process waits for it here"))
    read = process.bytes_read or 0.0
    draft.because(f"{size(int(read))} a second are read" if read > MOVING else "")
    draft.because(f"{view.batches} batches arrived during the examination" if view.batches else "")
    workers = sum(each.is_loader_worker for each in stall.processes)
    draft.because(f"{workers} workers read" if workers else "there are no workers: reading and training take turns")
    if loop is None:
        draft.help("more workers and `prefetch_factor`, or files that are quicker to read")
    return draft.rated("note")
