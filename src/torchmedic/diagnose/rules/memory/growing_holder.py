"""A variable holds more and more data, step by step, and nothing ever takes any of it out.

What: a container, or one tensor, array or text, grows at a steady rate while training goes on. Nothing in the source
empties it, and it did not stop growing when the data had been seen once, as a cache would.

Why: results, features or batches are collected for later and never dropped; a log keeps arrays; `torch.cat([seen, x])`
or `text += ...` makes a bigger copy each time.

Cure: keep only what is needed (numbers, a `deque(maxlen=...)`, the last few), write the rest to disk, or empty it at
the end of each epoch.
"""

from __future__ import annotations

from torchmedic.diagnose.growth_words import end, measured, period
from torchmedic.diagnose.last_words import size
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis
from torchmedic.replay.leaks import LeakEvidence

CODE, NAME = "TM452", "growing-holder"


def check(evidence: LeakEvidence) -> Diagnosis | None:
    growth = evidence.growth
    if growth.what != "data" or not evidence.matters or evidence.is_emptied:
        return None
    if growth.period == "batch" and not evidence.is_critical:
        return None  # results of one pass, perhaps
    if evidence.has_passes and evidence.grew_over_passes() < 2 and not evidence.is_critical:
        return None  # whatever is kept of the data, it may have all of it soon
    if evidence.put is None or (evidence.put.is_guarded and evidence.grew_over_passes() < 3):
        return None  # a cache
    name = growth.held.name
    items = f" in {growth.held.size} items" if growth.held.kind == "items" else ""
    draft = Draft(
        CODE,
        NAME,
        "likely",
        f"`{name}` holds {size(evidence.bytes_held)}{items} and grows with every {period(evidence)}",
        f"about {size(evidence.bytes_per_period)} came with each {period(evidence)} from step {growth.first.step} "
        f"to step {growth.last.step}, and no line of the source takes anything out",
    )
    draft.at(evidence.at_put("cause", "what is put in here stays"))
    draft.because(measured(evidence), end(evidence))
    draft.help(f"keep less in `{name}`: numbers, only the last items (`deque(maxlen=...)`), or files on disk")
    return draft.done(step=evidence.step, rank=evidence.rank, severity="warning")


RULE = Rule(CODE, NAME, check)
