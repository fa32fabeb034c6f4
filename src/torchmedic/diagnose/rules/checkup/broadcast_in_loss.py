"""The prediction and the target of a loss have shapes that broadcast to a table of all pairs.

What: a prediction of shape (N, 1) was combined with a target of shape (N,). Both are broadcast to (N, N), so every
prediction is compared with every target, not only with its own. The same happens to losses or log-probabilities of
shape (N,) that are multiplied by weights or advantages of shape (N, 1), where all products become one number.

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
# Nodes that treat each element of a table for itself.
_ELEMENTWISE = ("NegBackward", "MulBackward", "DivBackward", "AddBackward", "SubBackward", "MinimumBackward")
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
            pair = _multiplies(graph, node)
            if pair is not None and node.birth is not None:
                return _of_product(evidence, graph, node.birth.sites, *pair)
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
    if made.shape is None or not _comes_from_layer(graph, maker):
        return None
    others = [side for side in node.birth.operands if side is not None and not side.has_gradient]
    if len(others) != 1 or not _makes_pairs(made.shape, others[0].shape):
        return None
    if math.prod(node.shape) <= max(math.prod(made.shape), math.prod(others[0].shape)):
        return None
    return made.shape, others[0].shape


def _comes_from_layer(graph: LossGraph, node: Node) -> bool:
    """Whether a layer gave a value, or the terms of a sum that have its shape, as a score with its biases."""
    pending, seen = [node], set[int]()
    while pending:
        each = pending.pop()
        if each.number in seen or each.kind in _RESHAPING or each.birth is None:
            continue
        seen.add(each.number)
        if each.birth.layer is not None:
            return True
        if each.kind in _ELEMENTWISE:
            pending += [graph.nodes[number] for number in each.behind if graph.nodes[number].shape == node.shape]
    return False


def _multiplies(graph: LossGraph, node: Node) -> tuple[Shape, Shape] | None:
    """The shapes of a column and a row whose products are all averaged: that is the product of their two means."""
    if node.kind != "MulBackward" or len(node.shape or ()) != 2 or graph.is_followed_by_weights(node):
        return None
    shapes = [graph.nodes[number].shape or () for number in node.behind] + [node.multiplied] * len(node.missing)
    if len(shapes) != 2 or not _makes_pairs(*shapes) or not _is_averaged(graph, node):
        return None
    return shapes[0], shapes[1]


def _is_averaged(graph: LossGraph, node: Node) -> bool:
    """Whether all elements of a table become one number, and nothing on the way looks at a row or a column."""
    table, pending = node.shape, [node]
    while pending:
        readers = graph.readers(pending.pop())
        for reader in readers:
            if reader.kind in ("MeanBackward", "SumBackward") and not reader.shape:
                continue
            if reader.kind not in _ELEMENTWISE or reader.shape != table:
                return False
            pending.append(reader)
        if not readers:
            return False
    return True


def _of_product(evidence: CheckUp, graph: LossGraph, sites: tuple[Site, ...], first: Shape, second: Shape) -> Draft:
    size = max(*first, *second)
    draft = check.draft(evidence, "proven")
    draft.message = f"a product of the shapes {list(first)} and {list(second)} is broadcast to all pairs"
    draft.cause = "every value is multiplied by the weights of all items, so the loss is the product of two means"
    draft.at(evidence.at("cause", sites, f"{list(first)} times {list(second)}: {size * size} products, not {size}"))
    draft.because(f"all {size * size} products become one number, in step {graph.step}")
    draft.help("give both factors the same shape: `.squeeze(-1)` on the one with two dimensions")
    return draft.about(step=graph.step)


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
