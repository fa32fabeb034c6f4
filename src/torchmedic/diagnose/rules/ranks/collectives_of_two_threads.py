"""Two threads of a rank call collectives in the same group, and each rank has another order of their calls.

What: collectives of one group pair up by their order. Two threads of each rank make calls in the same group, and which
of them is first is a matter of chance. So a call of one thread meets a call of the other thread on another rank.

Why: a thread for metrics, checkpoints or prefetching calls collectives while the main thread trains.

Cure: make a group for the thread (`dist.new_group()`, on all ranks and in the same order), and pass it to the calls of
this thread. Or leave all collectives to the main thread.
"""

from __future__ import annotations

from msgspec.structs import replace

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import at_call, place, ranks, show, words
from torchmedic.records.ranks import Job


@rule("TM722", "collectives-of-two-threads")
def check(job: Job) -> Draft | None:
    found = job.difference
    if found is None or found.call is None or found.expected is None or found.call.thread == found.expected.thread:
        return None
    side, main = (found.call, found.expected) if found.call.thread else (found.expected, found.call)
    where = [
        f"{ranks(who)}: {words(call)}" for who, call in ((found.culprits, found.call), (found.others, found.expected))
    ]
    logs = [state.log for state in job.ranks if state.log is not None]
    are_two = {call.thread for log in logs for call in log.calls if call.group == found.group} == {0, 1}
    draft = check.draft(job, "proven" if are_two else "likely")
    draft.message = (
        f"two threads call collectives in one group, and {words(side)} of one met {words(main)} of the other"
    )
    draft.cause = f"the order of {words(side)}, {place(side)}, and {words(main)}, {place(main)}, differs between ranks"
    draft.at(at_call(side, "cause", f"{where[0 if side is found.call else 1]}, in a second thread"))
    draft.at(at_call(main, "surfaced", f"{where[1 if side is found.call else 0]}, at the same time"))
    draft.because("the calls of each thread alone have the same order on all ranks" if are_two else "")
    show(draft, job, replace(found, by="nothing"))
    return draft.help("give the thread a group of its own: `dist.new_group()` on all ranks, and `group=` in its calls")
