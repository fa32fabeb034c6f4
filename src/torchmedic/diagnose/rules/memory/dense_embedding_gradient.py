"""The gradient of a large embedding is as large as the embedding itself, even if few rows are used.

What: backward ran out of memory when it created the gradient of an embedding table: one row for every entry of the
table, nearly all of them zero.

Why: `nn.Embedding`, `F.embedding` and indexing (`table[ids]`) create a dense gradient by default, and the optimizer
keeps a dense state for it.

Cure: use `nn.Embedding(..., sparse=True)` or `F.embedding(ids, table, sparse=True)` with an optimizer that supports
sparse gradients (`SGD`, `SparseAdam`, `Adagrad`), or a smaller table.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.memory._table import differentiated, shown
from torchmedic.diagnose.words.format import size
from torchmedic.evidence.exception import RaisedEvidence
from torchmedic.evidence.memory.accounting.saved_by_graph import leaves_of
from torchmedic.evidence.memory.autopsy import Autopsy
from torchmedic.records import Location
from torchmedic.source.lookup.layers import constructed_at, layer_built_at
from torchmedic.source.objects.graph import name_of

_LAYERS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_LOOKUPS = ("Embedding", "Index", "Gather", "Take")  # what the nodes are called that look rows up


@rule("TM409", "dense-embedding-gradient")
def check(evidence: RaisedEvidence) -> Draft | None:
    autopsy = evidence.autopsy
    if autopsy is None or not autopsy.in_backward or autopsy.asked is None:
        return None
    node = autopsy.refusal.node if autopsy.refusal is not None else ""
    following = autopsy.next_node  # of those that backward has still to go through
    if not node and following is not None:
        node = name_of(following)
    if not node.startswith(_LOOKUPS):
        return None  # it only happens to be as large
    layer = _layer(autopsy, following)
    table = layer.weight if layer is not None else _looked_up(autopsy, following)
    if table is None:
        return None
    rows, shape = table.shape[0], list(table.shape)
    draft = check.draft(evidence, "proven")
    draft.message = f"the gradient of an embedding of {shape} takes {size(table.nbytes)}"
    draft.cause = f"it is dense: it has all {rows} rows, whatever was looked up"
    built = _built_at(evidence, layer) if layer is not None else _forward_line(autopsy)
    draft.at(built, *evidence.at_user_line("cause" if built is None else "surfaced", "refused here"))
    draft.at(differentiated(autopsy) if layer is not None else None)
    shown(draft, autopsy)
    how = "build it with `sparse=True`" if layer is not None else "look it up with `F.embedding(..., sparse=True)`"
    return draft.help(f"{how} and use an optimizer that takes sparse gradients (SGD, SparseAdam)")


def _layer(autopsy: Autopsy, node: Any) -> Any:
    """The layer whose gradient has as many bytes as were asked for, and which the node has looked up in."""
    leaves = leaves_of(node) if node is not None else []
    fitting = [
        each
        for each in autopsy.book.modules
        if isinstance(each, _LAYERS)
        and not each.sparse
        and each.weight.requires_grad
        and _is_asked_for(each.weight, autopsy)
        and (not leaves or any(leaf is each.weight for leaf in leaves))
    ]
    return fitting[0] if len(fitting) == 1 else None


def _looked_up(autopsy: Autopsy, node: Any) -> torch.Tensor | None:
    """The tensor of no layer that rows are taken of, and whose gradient has as many bytes as were asked for."""
    found = (
        [leaf for leaf in leaves_of(node) if leaf.dim() and _is_asked_for(leaf, autopsy)] if node is not None else []
    )
    return found[0] if len(found) == 1 else None


def _is_asked_for(table: torch.Tensor, autopsy: Autopsy) -> bool:
    asked = autopsy.asked or 0
    return abs(table.nbytes - asked) <= max(512, asked // 100)


def _built_at(evidence: RaisedEvidence, layer: torch.nn.Module) -> Location | None:
    label = "its gradient is as large as the table"
    built = layer_built_at(evidence.frames, layer, label)
    shape = tuple(getattr(layer, "weight").shape)  # noqa: B009
    return constructed_at(type(layer), shape, built, label) or (
        msgspec.structs.replace(built, role="cause") if built is not None else None
    )


def _forward_line(autopsy: Autopsy) -> Location | None:
    place = autopsy.forward_place
    if place is None or place.spot is None:
        return None
    return place.spot.location("cause", "looked up here: its gradient is as large as the table")
