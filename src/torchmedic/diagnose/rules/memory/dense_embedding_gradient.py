"""The gradient of a large embedding is as large as the embedding, whatever is looked up in it.

What: backward ran out of memory when it made the gradient of an embedding table: one row for every word, nearly all of
them zero.

Why: `nn.Embedding` makes a dense gradient unless it is told otherwise, and the optimizer keeps a dense state for it.

Cure: `nn.Embedding(..., sparse=True)` with an optimizer that takes sparse gradients (`SGD`, `SparseAdam`, `Adagrad`),
or a smaller table.
"""

from __future__ import annotations

import msgspec
import torch

from torchmedic.diagnose.last_words import size
from torchmedic.diagnose.memory_words import differentiated, shown
from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.records import Diagnosis
from torchmedic.replay.evidence import RaisedEvidence
from torchmedic.replay.memory.autopsy import Autopsy, autopsy_of
from torchmedic.replay.origins import built_at

CODE, NAME = "TM409", "dense-embedding-gradient"


def check(evidence: RaisedEvidence) -> Diagnosis | None:
    autopsy = autopsy_of(evidence)
    if autopsy is None or not autopsy.in_backward or autopsy.asked is None:
        return None
    node = autopsy.refusal.node if autopsy.refusal is not None else ""
    if node and not node.startswith("Embedding"):
        return None
    table = _table(autopsy)
    if table is None:
        return None
    last = max(autopsy.book.saved, key=lambda entry: entry.sequence, default=None)
    is_next = last is not None and last.node.startswith("Embedding")  # of those that backward has still to go through
    if not node and not is_next:
        return None  # it only happens to be as large
    rows = table.weight.shape[0]
    draft = Draft(
        CODE,
        NAME,
        "proven",
        f"the gradient of an embedding of {list(table.weight.shape)} takes {size(table.weight.nbytes)}",
        f"it is dense: it has all {rows} rows, whatever was looked up",
    )
    built = built_at(evidence.frames, table, "its gradient is as large as the table")
    draft.at(msgspec.structs.replace(built, role="cause") if built is not None else None)
    draft.at(*evidence.at_user_line("cause" if built is None else "surfaced", "refused here"), differentiated(autopsy))
    shown(draft, autopsy)
    draft.help("build it with `sparse=True` and use an optimizer that takes sparse gradients (SGD, SparseAdam)")
    return draft.done(step=evidence.incident.step, rank=evidence.incident.rank)


def _table(autopsy: Autopsy) -> torch.nn.Embedding | None:
    """The embedding whose gradient has as many bytes as were asked for."""
    assert autopsy.asked is not None
    fitting = [
        each
        for each in autopsy.book.modules
        if isinstance(each, torch.nn.Embedding)
        and not each.sparse
        and each.weight.requires_grad
        and abs(each.weight.nbytes - autopsy.asked) <= max(512, autopsy.asked // 100)
    ]
    return fitting[0] if len(fitting) == 1 else None


RULE = Rule(CODE, NAME, check)
