"""No thread or process reads the items of a queue.

What: a process waits for a child to end, but the child cannot end, because items that it put into a
`multiprocessing.Queue` have not been read; or a thread waits for space in a full queue, and no consumer is left.

Why: such a queue uses a pipe, which holds 64 kB. A process that has put more than that can end only after the items
have been read, so `join()` before `get()` waits forever. A queue with a `maxsize` fills up when the thread or process
that empties it has ended, most often with an exception.

Cure: `get()` all items first, then `join()`. Keep the consumer alive longer than the producer, and report its
exceptions; `put(item, timeout=60)` turns the hang into an exception.
"""

from __future__ import annotations

import os

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._nobody_left import Silence, nobody
from torchmedic.diagnose.rules.hangs._wait_chain import Waiter, chain, children_awaited
from torchmedic.diagnose.rules.hangs.output_not_drained import writes_into_pipe
from torchmedic.diagnose.words.stall import at, command, main_line, stall_rule
from torchmedic.records.inside import LockView, PyFrame
from torchmedic.records.stall import Stall

_QUEUES = os.path.join("multiprocessing", "queues.py")
_SPAWN = os.path.join("torch", "multiprocessing", "spawn.py")


@stall_rule("TM512", "queue-not-drained")
def check(stall: Stall) -> Draft | None:
    waiters = chain(stall)
    for waiter in waiters:
        writer = _cannot_end(stall, waiter, waiters)
        if writer is not None:
            return _joined(stall, waiter, writer)
    joining = _reader_that_joins(stall)
    if joining is not None:
        return _not_read(stall, joining)
    for waiter in waiters:
        wanted = waiter.wanted
        if wanted is None or wanted.kind != "queue put" or not waiter.stands(stall) or waiter.ends_by_itself:
            continue
        silence = nobody(stall, waiter)
        if silence is not None:
            return _full(stall, waiter, wanted, silence)
    return None


def _cannot_end(stall: Stall, waiter: Waiter, waiters: list[Waiter]) -> Waiter | None:
    """The thread of a child that is waited for which writes into a pipe that the one who waits should read."""
    children = set(children_awaited(stall, waiter))
    if waiter.python is not None and waiter.python.calls("join", _SPAWN) is not None:
        children = {each.pid for each in stall.processes if each.parent == waiter.process.pid}
    if not children or waiter.python is None or waiter.python.calls("join", "multiprocessing") is None:
        return None
    for each in [*waiters, *_all_threads(stall, children)]:
        if each.process.pid in children and each.stands(stall):
            for wait in each.files:
                if writes_into_pipe(wait) and waiter.process.pid in wait.peers:
                    return each
    return None


def _reader_that_joins(stall: Stall) -> PyFrame | None:
    """The line at which the parent waits for the end of this process, which waits for somebody to read its queue."""
    main = stall.thread
    if main is None or main.moved or main.calls("_finalize_join", _QUEUES) is None:
        return None
    for peer in stall.peers:
        inside = peer.inside if peer.process.pid in stall.above else None
        above = inside.main if inside is not None else None
        if inside is None or above is None or above.moved or above.calls("join", "multiprocessing") is None:
            continue
        if not any(thread.user_frame is not None and not thread.main for thread in inside.threads):
            return above.user_frame
    return None


def _not_read(stall: Stall, joining: PyFrame) -> Draft:
    """As an item that a spawned process has put is not read before the process is waited for."""
    draft = check.draft(stall, "proven")
    draft.message = "the process cannot end: items that it put into a queue have not been read"
    draft.cause = "it still writes into a full pipe, and its parent, which should read, waits for its end"
    draft.at(at(joining, "cause", "waits for the end of its processes, and does not read"))
    draft.because("its function is done; a thread of the queue stands in a write, or waits for its turn to write")
    return draft.help("`get()` all results first, `join()` afterwards: `mp.spawn(..., join=False)` gives what to join")


def _all_threads(stall: Stall, pids: set[int]) -> list[Waiter]:
    """A child that ends does not answer any more; its threads can be seen from outside."""
    return [Waiter(process, row, None) for process in stall.processes if process.pid in pids for row in process.threads]


def _joined(stall: Stall, waiter: Waiter, writer: Waiter) -> Draft:
    child = writer.process
    name = waiter.wanted.name if waiter.wanted is not None else "the child"
    draft = check.draft(stall, "proven")
    draft.message = f"`{name}` cannot end: items that it put into a queue have not been read"
    draft.cause = (
        f"the child ({child.pid}) still writes into a full pipe, which only the process that waits for it could read"
    )
    draft.at(at(waiter.frame, "cause", "waits for the end of the child, and does not read"))
    draft.at(main_line(stall))
    where = next((f"descriptor {wait.descriptor}, {wait.target}" for wait in writer.files), "")
    draft.because(f"a thread of {command(child, child.pid)} stands in a write to {where}")
    return draft.help("`get()` all results first, `join()` afterwards")


def _full(stall: Stall, waiter: Waiter, wanted: LockView, silence: Silence) -> Draft:
    holds = f" of {wanted.room} items" if wanted.room else ""
    draft = check.draft(stall, silence.grade)
    draft.message = f"the queue `{wanted.name}` is full, and no consumer is left"
    draft.cause = f"`put` waits for room in a queue{holds} without a time limit"
    draft.at(at(waiter.frame, "cause", "waits for room here"), main_line(stall))
    draft.because(f"it holds {wanted.count}{holds}" if wanted.count is not None else "", *silence.facts)
    draft.help("find out why its consumer has ended; `put(item, timeout=60)` raises instead of waiting forever")
    return draft.rated(silence.severity)
