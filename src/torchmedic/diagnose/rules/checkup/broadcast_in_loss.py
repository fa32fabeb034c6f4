"""The prediction and the target of a loss have shapes that broadcast to a table of all pairs.

What: a prediction of shape (N, 1) was combined with a target of shape (N,). Both are broadcast to (N, N), so every
prediction is compared with every target, not only with its own.

Why: broadcasting aligns shapes from the right. A column and a row are compatible, and make a table. The loss is a
plausible number, and the model learns the mean of the targets.

Cure: give both the same shape: `prediction.squeeze(1)`, or `target.unsqueeze(1)`.
"""

from __future__ import annotations

import math

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.node_births import Site

_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
# Nodes that keep the shape of what a layer gave: activations, and the cast to float32 that is usual under autocast.
_SAME_SHAPE = ("SigmoidBackward", "TanhBackward", "ReluBackward", "ExpBackward", "SoftplusBackward", "ToCopyBackward")
Shape = tuple[int, ...]
# Nodes that make a shape on purpose: whoever writes `a.unsqueeze(1) - b` wants all pairs.
_RESHAPING = ("UnsqueezeBackward", "ViewBackward", "ReshapeAliasBackward", "ExpandBackward", "IndexBackward")


@rule("TM632", "broadcast-in-loss")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        for call in graph.losses():
            if call.name in _LOSSES and _makes_pairs(call.shape, call.target_shape):
                return _diagnosis(evidence, graph, call.sites, call.shape, call.target_shape, f"`{call.name}`")
        for node in graph.nodes:
            found = _differs(graph, node)
            if found is not None and node.birth is not None:
                return _diagnosis(evidence, graph, node.birth.sites, *found, "the difference")
    return None


def _makes_pairs(first: Shape, second: Shape) -> bool:
    """Whether each of two shapes is stretched by the other, and a column meets a row: (N, 1) and (N,)."""
    if len(first) == len(second):
        return False
    longer, shorter = (first, second) if len(first) > len(second) else (second, first)
    size = shorter[-1] if shorter else 1
    if size < 2 or len(longer) != len(shorter) + 1 or longer[-1] != 1:
        return False
    return longer[:-1] == shorter


def _differs(graph: LossGraph, node: Node) -> tuple[Shape, Shape] | None:
    """For `prediction - target` in the user's code, with a prediction that a layer gave and a target: their shapes."""
    if node.kind not in ("SubBackward", "RsubBackward") or node.birth is None or node.birth.operands is None:
        return None
    if len(node.behind) != 1 or node.shape is None:
        return None
    made = graph.nodes[node.behind[0]]
    maker = made
    while maker.kind in _SAME_SHAPE and len(maker.behind) == 1:
        maker = graph.nodes[maker.behind[0]]
    if made.shape is None or maker.kind in _RESHAPING or maker.birth is None or maker.birth.layer is None:
        return None
    others = [side for side in node.birth.operands if side is not None and not side.has_gradient]
    if len(others) != 1 or not _makes_pairs(made.shape, others[0].shape):
        return None
    if math.prod(node.shape) <= max(math.prod(made.shape), math.prod(others[0].shape)):
        return None
    return made.shape, others[0].shape


def _diagnosis(
    evidence: CheckUp, graph: LossGraph, sites: tuple[Site, ...], first: Shape, second: Shape, what: str
) -> Draft:
    size = max(*first, *second)
    table = math.prod(first) * size
    draft = check.draft(evidence, "proven")
    draft.message = (
        f"prediction and target have the shapes {list(first)} and {list(second)}, which broadcast to all pairs"
    )
    draft.cause = f"{what} compares every prediction with every target, not with its own"
    draft.at(evidence.at("cause", sites, f"{list(first)} against {list(second)}: {table} pairs instead of {size}"))
    draft.because(f"input {list(first)}, target {list(second)}, in step {graph.step}")
    column = "prediction" if len(first) > len(second) else "target"
    row = "target" if column == "prediction" else "prediction"
    draft.help(f"give both the same shape: `.squeeze(-1)` on the {column}, or `.unsqueeze(-1)` on the {row}")
    return draft.about(step=graph.step)
