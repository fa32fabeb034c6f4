"""One rank left the training loop while the others go on.

What: the other ranks are in one more turn of a loop that calls a collective; one rank has left this loop, by its end
or by a `break`, and never makes the call that they wait for.

Why: the ranks have a different number of batches (a dataset split by hand, a filter, `drop_last` on one side only), or
one rank decides by itself to stop (its own validation loss, its own time limit).

Cure: give all ranks the same number of batches (`DistributedSampler`, or `drop_last`), or wrap the loop in
`torch.distributed.algorithms.join.Join`. Decide to stop together: `all_reduce` a flag and let all ranks obey it.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import rule
from torchmedic.diagnose.rules.ranks._side_by_side import at_call, left_loop, ranks, show, words
from torchmedic.diagnose.words.death import line_location
from torchmedic.records import Diagnosis
from torchmedic.records.ranks import Job


@rule("TM704", "rank-left-the-loop")
def check(job: Job) -> Diagnosis | None:
    difference = job.difference
    if difference is None or difference.expected is None or difference.kind == "content":
        return None
    left = left_loop(job, difference)
    if left is None:
        return None
    file, loop = left
    who, others = ranks(difference.culprits), ranks(difference.others)
    leaves = loop.exits[0] if len(loop.exits) == 1 else None
    turns = difference.usual
    what = "backward" if difference.expected.native else words(difference.expected)
    draft = check.draft(
        job,
        "likely" if leaves is not None else "proven",
        f"{who} left the loop `{loop.header}` while {others} went on",
        f"{others} made {what} once more; {who} had left the loop "
        + (f"by `{leaves.exit}`, which only `if {leaves.test}` decides" if leaves is not None else "at its end"),
    )
    line = leaves.line if leaves is not None else loop.line
    draft.at(
        line_location("cause", file, line, f"{who} left the loop here"),
        at_call(difference.expected, "surfaced", f"{others}: {what}, which waits for all ranks"),
        at_call(difference.call, "origin", f"{who}: {words(difference.call)}" if difference.call is not None else ""),
    )
    show(draft, job, difference)
    draft.because(f"all ranks had made this call {turns} times before" if turns else "")
    if leaves is not None:
        draft.help("decide together: all_reduce a flag, and let all ranks leave the loop in the same turn")
    else:
        draft.help("give every rank the same number of batches, or wrap the loop in `Join([model])`")
    return draft.done()
