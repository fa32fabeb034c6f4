"""Every batch is larger than the previous one, until one no longer fits.

What: the input of the model has grown from step to step.

Why: inputs are collected and passed again as a whole (a context that is never cut, a buffer that is always used
completely), or tensors are concatenated to the tensors of the previous step.

Cure: cut the carried data to a fixed size, or draw a batch of a fixed size from it.
"""

from __future__ import annotations

import math

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.memory._table import noticed, shown
from torchmedic.diagnose.rules.memory.outlier_batch import called_at
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.attempts import call_under_way
from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.evidence.memory.batch_sizes import comparable, is_growing
from torchmedic.evidence.memory.grown_tensors import grown_input

_MIN_ASKED_SHARE = 0.25  # share of all tensors: what is asked for must be for what has grown, and not the last straw


@rule("TM411", "growing-batch")
def check(evidence: RaisedEvidence) -> Draft | None:
    autopsy = evidence.autopsy
    if autopsy is None or autopsy.agent is None or autopsy.in_optimizer:
        return None
    grad = autopsy.builds_graph
    calls = comparable(autopsy.agent.batches.shapes, call_under_way(evidence, grad), grad)
    if not calls or not is_growing(calls) or math.prod(calls[-1].shape) < 2 * math.prod(calls[0].shape):
        return _by_source(evidence, autopsy)
    if not _is_for_batch(autopsy):
        return None
    first, last = calls[0].shape, calls[-1].shape
    draft = check.draft(evidence, "proven")
    draft.message = f"the batch has grown from {list(first)} to {list(last)} in {len(calls) - 1} steps"
    draft.cause = "each call of the model was given at least as much as the one before it"
    label = f"called with {list(last)}"
    joined = grown_input(evidence, autopsy.book.modules)
    if joined is not None:
        draft.at(joined.at.location("cause", "more is joined to it here"), joined.call.location("surfaced", label))
    else:
        draft.at(called_at(evidence, label))
    draft.at(*noticed(autopsy))
    shown(draft, autopsy)
    return draft.help("cut the data that is carried from step to step to a fixed size")


def _is_for_batch(autopsy: Autopsy) -> bool:
    """Whether what the step holds and asks for is a good part of all."""
    book, asked = autopsy.book, autopsy.asked or 0
    pinned = sum(memory.nbytes for memory, each in book.held.values() if autopsy.is_of_failing_call(each.holder))
    of_batch = book.total("the batch") + book.total("saved activations") + pinned + asked
    return of_batch >= _MIN_ASKED_SHARE * (book.everything + asked)


def _by_source(evidence: RaisedEvidence, autopsy: Autopsy) -> Draft | None:
    """Nobody has counted the calls, but the source shows that what the model is given grows with every turn."""
    found = None if len(autopsy.process.batches.shapes) > 1 else grown_input(evidence, autopsy.book.modules)
    if found is None or (autopsy.asked or 0) < _MIN_ASKED_SHARE * autopsy.book.everything:
        return None
    shape = list(found.shape)
    draft = check.draft(evidence, "likely")
    draft.message = f"`{found.name}` grows in every iteration of the loop, and now has shape {shape}"
    draft.cause = "the source joins more to it each time and takes nothing away"
    called = found.call.location("surfaced", f"called with {shape}")
    draft.at(found.at.location("cause", "more is joined to it here"), called, *noticed(autopsy))
    shown(draft, autopsy)
    return draft.help(f"cut `{found.name}` to a fixed size before the model is called with it")
