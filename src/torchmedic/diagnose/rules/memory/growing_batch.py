"""Every batch is larger than the one before it, until one no longer fits.

What: what the model is called with has grown from step to step.

Why: inputs are collected and fed again as a whole (a context that is never cut, a buffer that is used up entirely), or
tensors are concatenated to those of the last step.

Cure: cut what is carried on to a fixed size, or draw a batch of a fixed size from it.
"""

from __future__ import annotations

import math

from torchmedic.diagnose.memory_words import noticed, shown
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.diagnose.rules.memory.outlier_batch import called_at
from torchmedic.records import Diagnosis
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.memory.autopsy import autopsy_of
from torchmedic.replay.memory.sizes import is_growing

CODE, NAME = "TM411", "growing-batch"


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    autopsy = autopsy_of(evidence)
    if autopsy is None or autopsy.agent is None or autopsy.in_optimizer:
        return None
    given = list(autopsy.agent.batches.shapes)
    if not given or not is_growing(given) or math.prod(given[-1].shape) < 2 * math.prod(given[0].shape):
        return None
    first, last = given[0].shape, given[-1].shape
    draft = Draft(
        CODE,
        NAME,
        "proven",
        f"the batch has grown from {list(first)} to {list(last)} in {len(given) - 1} steps",
        "each call of the model was given at least as much as the one before it",
    )
    draft.at(called_at(evidence, f"called with {list(last)}"), *noticed(autopsy))
    shown(draft, autopsy)
    draft.help("cut what is carried on from step to step to a fixed size")
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


RULE = Rule(CODE, NAME, check)
