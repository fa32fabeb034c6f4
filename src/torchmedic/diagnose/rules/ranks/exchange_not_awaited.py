"""The weights are updated while their gradients are still exchanged between the ranks.

What: a collective with `async_op=True` returns at once, and changes its tensor later. At the beginning of an update,
the exchange of a gradient was not complete. The update has used the gradient of this rank alone, or a part of the sum.

Why: nobody calls `wait()` on the object that the collective returns, or the `wait()` comes after the update.

Cure: keep what every call returns, and call `wait()` on all of them before the gradients are used.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.ranks._side_by_side import ranks
from torchmedic.diagnose.words.death import line_location
from torchmedic.records.rank_facts import JobFacts


@rule("TM719", "exchange-not-awaited")
def check(job: JobFacts) -> Draft | None:
    seen = [each for each in job.ranks if each.unawaited is not None]
    if not seen or seen[0].unawaited is None:
        return None
    line, updating = seen[0].unawaited, seen[0].updating
    draft = check.draft(job, "proven", "an update began before the exchange of its gradients was complete")
    draft.cause = "the call returns at once, and nobody waited for its end before the weights were updated"
    draft.at(line_location("cause", line.file, line.line, "returns before the gradient is exchanged"))
    if updating is not None:
        draft.at(line_location("surfaced", updating.file, updating.line, "the gradient is used here"))
    draft.because(f"seen on {ranks([each.rank for each in seen])}, in the first updates")
    draft.help("keep what the call returns, and call `wait()` on it before the gradient is used")
    return draft.rated("warning")
