"""A DataLoader worker does not deliver its batch.

What: the main process waits for a batch, and the worker that reads it is stuck in the code of the dataset (or in a
function that it calls), and waits for something that never happens. DataLoader reports nothing: without a `timeout` it
waits forever.

Why: one item that never ends (a download, a lock, a server that does not answer, an endless loop), a file on storage
that hangs, or a library that cannot be used in a worker.

Cure: the diagnosis names the line and the item: read that item alone (`dataset[i]`) to reproduce the hang without
workers. Set a time limit for the read; `DataLoader(..., timeout=60)` turns the hang into an exception.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._at_work import sleeps_for_long
from torchmedic.diagnose.words.stall import SLEEPS, at, busy, main_line, short, stall_rule
from torchmedic.records.inside import InsideView, PyThread
from torchmedic.records.process import ProcessView
from torchmedic.records.stall import Stall


@stall_rule("TM511", "worker-stuck")
def check(stall: Stall) -> Draft | None:
    if not waits_for_batch(stall.thread):
        return None
    for process in stall.processes:
        view = stall.inside.get(process.pid)
        thread = view.main if view is not None else None
        if not process.is_loader_worker or view is None or thread is None or not _reads(thread):
            continue
        frame = thread.user_frame
        if frame is None or not _is_stuck(stall, process, view):
            continue
        waits = "" if not thread.waits_for else f", waiting for {thread.waits_for.kind} `{thread.waits_for.name}`"
        item = f" item {view.item}" if view.item else ""
        draft = check.draft(stall, "proven")
        draft.message = f"a DataLoader worker is stuck in the dataset{' on' + item if item else ''}"
        draft.cause = f"worker {process.pid} stands at {short(frame)}{waits}"
        draft.at(at(frame, "cause", f"the worker is stuck here{',' + item if item else ''}"))
        draft.at(main_line(stall))
        draft.because(*_given(stall, process.pid))
        if thread.waits_for is not None and thread.waits_for.shared and "lock" in thread.waits_for.kind:
            draft.help(f"take it with `with {thread.waits_for.name}:`, so that each way out of the block releases it")
        else:
            alone = f"read it alone to see it hang: `dataset[{view.item}]`"
            draft.help(alone if view.item else "read it with `num_workers=0`")
        return draft.help("`DataLoader(..., timeout=60)` raises an exception instead of waiting")
    return None


def _is_stuck(stall: Stall, process: ProcessView, view: InsideView) -> bool:
    """Whether the worker waits for one thing all the time, and not for the end of its own sleep."""
    thread, row = view.main, process.main
    if thread is None or row is None:
        return False
    if thread.moved:
        return busy(process) and view.loop is not None and (view.loop.endless or bool(view.loop.unchanged))
    if busy(process) or (row.syscall in SLEEPS and not sleeps_for_long(stall, process)):
        return False
    return row.asleep is None or row.asleep >= min(stall.limit, stall.still)


def waits_for_batch(thread: PyThread | None) -> bool:
    """Whether a thread waits for what a DataLoader's workers send."""
    return thread is not None and any(
        frame.function in ("_try_get_data", "_get_data", "_next_data") and frame.file.endswith("dataloader.py")
        for frame in thread.frames
    )


def _reads(thread: PyThread) -> bool:
    return any(frame.file.endswith("fetch.py") and "torch" in frame.file for frame in thread.frames)


def _given(stall: Stall, pid: int) -> list[str]:
    inner: InsideView | None = stall.inner
    for loader in inner.loaders if inner is not None else ():
        if pid in loader.workers:
            number = loader.workers.index(pid)
            items = loader.given[number] if number < len(loader.given) else ()
            shown = ", ".join(items[:8]) + (", ..." if len(items) > 8 else "")
            return [f"worker {number} of {len(loader.workers)} has not delivered items {shown}"] if items else []
    return []
