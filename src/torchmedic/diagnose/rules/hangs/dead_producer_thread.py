"""A thread waits for items of a queue, and the thread that filled the queue has ended.

What: a thread waits in `queue.get()` without a time limit. Every thread that could put something into the queue has
ended, so the wait never ends.

Why: an exception ended the producer and nobody saw it: an `except` that does nothing but return or print, the task of a
pool or of asyncio whose result is never asked for, a `sys.exit()` in a thread. Or the producer was done and did not say
so: the consumer expects one more item.

Cure: let the producer put a mark into the queue in a `finally:` (`None`, or the exception itself), and raise in the
consumer when the mark arrives. `get(timeout=60)` turns the hang into an exception.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft
from torchmedic.diagnose.rules.hangs._at_work import frames_in
from torchmedic.diagnose.rules.hangs._ended_threads import Ended, last_ended, signals
from torchmedic.diagnose.rules.hangs._nobody_left import Silence, nobody
from torchmedic.diagnose.rules.hangs._wait_chain import Waiter, chain, waiter_of
from torchmedic.diagnose.words.death import line_location
from torchmedic.diagnose.words.stall import at, main_line, stall_rule
from torchmedic.records.inside import LockView
from torchmedic.records.stall import Stall


@stall_rule("TM529", "dead-producer-thread")
def check(stall: Stall) -> Draft | None:
    for waiter in chain(stall):
        wanted = waiter.wanted
        if wanted is None or wanted.kind != "queue get" or wanted.shared:
            continue
        if not waiter.stands(stall) or waiter.ends_by_itself:
            continue
        silence, producer = nobody(stall, waiter), last_ended(stall, waiter, wanted)
        if silence is not None and producer is not None:
            return _told(stall, waiter, wanted, silence, producer)
    return _of_event_loop(stall)


def _of_event_loop(stall: Stall) -> Draft | None:
    """The loop of asyncio has nothing to do, no thread could give it work, and a task that gives items has failed."""
    main, waiter = stall.thread, waiter_of(stall, stall.pid, stall.pid)
    if main is None or waiter is None or not waiter.stands(stall) or waiter.ends_by_itself:
        return None
    view = stall.inner
    failed = [each for each in view.ended_threads if each.awaitable and signals(each)] if view is not None else []
    if (
        not failed
        or view is None
        or len(view.threads) > 1
        or frames_in(main, "selectors.py") is None
        or frames_in(main, "asyncio/base_events.py") is None
    ):
        return None
    task = failed[-1]
    draft = check.draft(stall, "likely")
    draft.message = f"the run waits in the loop of asyncio, and the task `{task.target}` has ended with an exception"
    draft.cause = "the loop has no task that is ready and no timer, and this task gave something to others"
    kind = task.error.partition(":")[0]
    label = f"`{task.target}` ends here with {kind}, and nobody learns of it"
    draft.at(line_location("cause", task.error_file, task.error_line, label), main_line(stall))
    draft.because(f"the exception of task `{task.name}` has not been asked for: {task.error}")
    return draft.help(f"correct what ends `{task.target}`: {task.error}").help(
        "let the consumer hear of it: run both with `asyncio.TaskGroup()` or `asyncio.gather(...)`"
    )


def _told(stall: Stall, waiter: Waiter, wanted: LockView, silence: Silence, producer: Ended) -> Draft:
    thread, failure = producer.thread, producer.failure
    draft = check.draft(stall, silence.grade if producer.same else "likely")
    draft.message = f"the run waits for the queue `{wanted.name}`, and the thread that filled it has ended"
    draft.cause = (
        f"`get` has no time limit, and thread `{thread.name}` ({thread.target}) puts nothing into the queue any more"
    )
    draft.at(failure, at(waiter.frame, "surfaced" if failure else "cause", f"waits for queue `{wanted.name}`"))
    if thread.started_line:
        draft.at(line_location("origin", thread.started_file, thread.started_line, "the producer was started here"))
    if producer.hides is not None:
        draft.at(line_location("writer", thread.file, producer.hides, "an exception that is caught here goes unseen"))
    draft.because(producer.told, *silence.facts)
    if failure is not None:
        draft.help(f"correct what ends `{thread.target}`: {thread.error}")
    elif producer.hides is not None:
        draft.help("let the handler put the exception into the queue, or raise it: now nobody learns of it")
    draft.help("put a mark into the queue in a `finally:` of the producer, and raise when the mark arrives")
    return draft.rated(silence.severity)
