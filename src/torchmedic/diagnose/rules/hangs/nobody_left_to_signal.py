"""A thread waits for a signal, and no thread is left that could send it.

What: a thread waits without a time limit for an event, a condition, a semaphore, a barrier, the result of a future or
an item of a queue. Only another thread (or process) can end the wait, and there is none: the others have ended, or wait
in the same way.

Why: the thread that should have called `set()`, `release()` or `put()` has already ended, with an exception, with
`sys.exit()` (which ends the thread and not the process) or through a branch without the call; a consumer that skips
`task_done()` for some items; a barrier for more threads than were started; a task that waits for another task of a pool
that has no free thread for it.

Cure: signal in a `finally:` block, so that the signal is always sent; report the exceptions of threads
(`future.result()` raises them). Set a time limit for the wait. Do not wait inside a pool for another task of the same
pool. Call `task_done()` for every item that was taken from a queue.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._ended_threads import last_ended
from torchmedic.diagnose.rules.hangs._nobody_left import Silence, nobody, timer
from torchmedic.diagnose.rules.hangs._unmarked_items import consumers, left_out
from torchmedic.diagnose.rules.hangs._wait_chain import Waiter, chain
from torchmedic.diagnose.words.format import duration
from torchmedic.diagnose.words.stall import at, main_line, stall_rule
from torchmedic.records.inside import LockView, PyFrame
from torchmedic.records.stall import Stall

_STRANGER_LIMITS = 5  # times the limit: for so long, something that ticks may be what is waited for
_MAX_TICK_SECONDS = 2.0  # seconds: what acts after longer is not just a heartbeat
_ENDS = {
    "lock": "release it",
    "reentrant lock": "release it",
    "lock between processes": "release it",
    "semaphore": "release it",
    "condition": "notify it",
    "notification": "notify it",
    "event": "set it",
    "barrier": "come to it",
    "future": "give a result",
    "queue get": "put anything into it",
    "queue join": "call `task_done()`",
}


@stall_rule("TM528", "nobody-left-to-signal")
def check(stall: Stall) -> Draft | None:
    waiters = chain(stall)
    found = [waiter for waiter in waiters if _waits_for_ever(stall, waiter)]
    # The last is the one that keeps the others, unless it is somebody who waits for work, or all wait for the same.
    found = found[:1] if found and found[-1].wanted and found[-1].wanted.kind == "queue get" else found[::-1]
    for waiter in found:
        silence, wanted = nobody(stall, waiter), waiter.wanted
        if silence is not None and wanted is not None:
            same = [each for each in waiters if each.wanted is not None and each.wanted.identity == wanted.identity]
            first = next((each for each in same if each.process.pid == waiter.process.pid), waiter)
            return _told(stall, first, wanted, silence)
    return _not_yet(stall, found[-1]) if found else None


def _not_yet(stall: Stall, waiter: Waiter) -> Draft | None:
    left, wanted = timer(stall, waiter), waiter.wanted
    if left is None or wanted is None or (left < _MAX_TICK_SECONDS and stall.still > _STRANGER_LIMITS * stall.limit):
        return None
    message = f"not hung yet: the run waits for the {wanted.kind} `{wanted.name}`, and a timer runs"
    draft = check.draft(stall, "possible", message, f"a thread acts in {duration(left)}, and may end the wait")
    draft.at(at(waiter.frame, "cause", f"waits for {wanted.kind} `{wanted.name}`"), main_line(stall))
    return draft.rated("note")


def _waits_for_ever(stall: Stall, waiter: Waiter) -> bool:
    wanted = waiter.wanted
    if wanted is None or wanted.kind not in _ENDS or waiter.frame is None:
        return False
    return waiter.stands(stall) and not waiter.ends_by_itself


def _told(stall: Stall, waiter: Waiter, wanted: LockView, silence: Silence) -> Draft:
    view = stall.inside.get(waiter.process.pid)
    takers = consumers(view, wanted) if wanted.kind == "queue join" and view is not None else []
    if takers:
        return _unmarked(stall, waiter, wanted, takers[0], silence)
    kind = wanted.kind.partition(" ")[0] if wanted.kind.startswith("queue") else wanted.kind
    if wanted.kind == "barrier" and wanted.room:
        message = f"{wanted.count} of {wanted.room} threads have come to the barrier `{wanted.name}`, and no more will"
    else:
        message = f"the run waits for the {kind} `{wanted.name}`, and no thread is left to {_ENDS[wanted.kind]}"
    draft = check.draft(stall, silence.grade)
    draft.message = message
    draft.cause = f"the wait for `{wanted.name}` has no time limit, and no thread can end it"
    ended = last_ended(stall, waiter, wanted)
    failure = ended.failure if ended is not None and ended.same else None
    draft.at(failure, at(waiter.frame, "surfaced" if failure else "cause", f"waits for {kind} `{wanted.name}`"))
    draft.at(main_line(stall)).because(*silence.facts)
    if ended is not None and failure is not None:
        draft.because(ended.told).help(f"correct what ends `{ended.thread.target}`: {ended.thread.error}")
    elif wanted.kind == "barrier":
        draft.help(
            f"start {wanted.room} threads, or create the barrier for the threads that exist" if wanted.room else ""
        )
    elif wanted.kind == "future":
        draft.help("do not wait in a pool for a task of the same pool, or give it a thread more")
    draft.help("signal in a `finally:` block, and give the wait a time limit, so that it raises an exception")
    return draft.rated(silence.severity)


def _unmarked(stall: Stall, waiter: Waiter, wanted: LockView, taker: PyFrame, silence: Silence) -> Draft:
    """The consumer is alive and waits for the next item: it has taken items without marking them as done."""
    draft = check.draft(stall, silence.grade)
    draft.message = f"items of the queue `{wanted.name}` were taken, and `task_done()` was not called for all of them"
    draft.cause = "`join()` waits for one `task_done()` per item; the consumer waits for the next item instead"
    guilty, waits = left_out(taker), f"waits for queue `{wanted.name}`"
    if guilty is not None:
        draft.at(guilty, at(waiter.frame, "surfaced", waits))
    else:
        draft.at(at(waiter.frame, "cause", waits), at(taker, "origin", "items are taken here"))
    draft.at(main_line(stall)).because(*silence.facts)
    return draft.help("call `task_done()` once for every item, in a `finally:` block").rated(silence.severity)
