"""A variable holds more data with every step, and nothing ever removes any of it.

What: a container, or one tensor, array or text, grows at a steady rate during training. Nothing in the source empties
it, and it did not stop growing after the first pass over the data, as a cache would.

Why: results, features or batches are collected for later and never dropped; a log keeps arrays; `torch.cat([seen, x])`
or `text += ...` makes a larger copy each time.

Cure: keep only what is needed (numbers, a `deque(maxlen=...)`, the last few items), write the rest to disk, or empty
the container at the end of each epoch.
"""

from __future__ import annotations

import ast

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.memory._growth import end, limit, measured, period, span, where
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.leaks.evidence import LeakEvidence
from torchmedic.source.syntax import callee

_EACH = 0.9  # items per step


@rule("TM452", "growing-holder")
def check(evidence: LeakEvidence) -> Draft | None:
    growth = evidence.growth
    if growth.what != "data" or not evidence.matters or evidence.is_emptied:
        return None
    if growth.period == "batch" and not evidence.is_critical:
        return None  # results of one pass, perhaps
    far = evidence.far_limit
    if far is None and (evidence.may_be_whole_soon or evidence.is_trained_on):
        return None
    if evidence.put is None or evidence.is_cache or evidence.may_fill_up or evidence.may_be_given_up:
        return None
    if _is_model(evidence) and (growth.period != "step" or growth.rate < _EACH):
        return None  # it grows layer by layer, or thaws
    name = growth.held.name
    items = f" in {growth.held.size} items" if growth.held.kind == "items" else ""
    draft = check.draft(evidence, "likely")
    draft.message = f"`{name}` holds {size(evidence.bytes_held)}{items} and grows with every {period(evidence)}"
    draft.cause = (
        f"about {size(evidence.bytes_per_period)} came with each {period(evidence)} {span(evidence)}, and "
        + ("no line of the source removes any item" if far is None else "nothing is taken out before memory ends")
    )
    draft.at(evidence.at_put("cause", "items that are added here are never removed"))
    draft.because(where(evidence), limit(evidence), measured(evidence), end(evidence))
    if far is None:
        draft.help(f"keep less in `{name}`: numbers, only the last items (`deque(maxlen=...)`), or files on disk")
    else:
        draft.help(f"let `{name}` have fewer items, or smaller ones (`uint8` for images), or keep them on disk")
    return draft.rated("warning")


def _is_model(evidence: LeakEvidence) -> bool:
    """Whether what is held are parts of the model, or the state of the optimizer for them."""
    weight, put = evidence.growth.weight, evidence.put
    if weight is not None and weight.of_modules:
        return True
    return put is not None and isinstance(put.node, ast.Call) and callee(put.node) == "add_param_group"
