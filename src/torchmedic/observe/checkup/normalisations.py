"""Over which dimension the softmaxes of a graph normalise, and whether their readers take the same dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node
    from torchmedic.observe.checkup.node_births import LossCall

_OF_CLASSES = ("nll_loss", "cross_entropy", "ctc_loss", "kl_div")
_OF_LOGARITHMS = ("nll_loss", "ctc_loss")
_UNCHANGED = frozenset("CloneBackward ToCopyBackward AliasBackward".split())
VIEWS = frozenset("ViewBackward UnsafeViewBackward ReshapeAliasBackward".split())
# Some rows of a tensor, in any order.
_ROWS = frozenset("IndexBackward IndexSelectBackward SliceBackward".split())
_KEEPING_ROWS = frozenset(
    "ViewBackward UnsafeViewBackward ReshapeAliasBackward ExpandBackward CloneBackward MulBackward DivBackward "
    "NativeDropoutBackward ToCopyBackward".split()
)

_PICKS = ("GatherBackward", "IndexBackward")
_OF_LAYERS = ("AddmmBackward", "MmBackward", "ConvolutionBackward", "ReluBackward")


def are_remarkable(graph: LossGraph) -> bool:
    if softmaxes_of_one(graph) or attention_over_batch(graph) or attention_over_queries(graph):
        return True
    return any(wrongly_normalised(graph)) or any(not_normalised(graph)) or any(read_by_rows(graph))


def softmaxes_of_one(graph: LossGraph) -> list[Node]:
    """The softmaxes over a dimension of size 1, whose results are constant."""
    return [node for node in graph.nodes if node.dim is not None and node.shape and node.shape[node.dim] == 1]


def wrongly_normalised(graph: LossGraph) -> Iterator[tuple[LossCall, Node, int]]:
    """Losses over the classes, and what they are given: a softmax over another dimension than that of the classes.

    The last is the dimension that the classes have there.

    Scores with as many classes as examples are left out: a contrastive loss may normalise over both dimensions.
    """
    for call in graph.losses():
        if call.name not in _OF_CLASSES or len(call.shape) < 2 or (call.name == "kl_div" and len(call.shape) > 2):
            continue
        axis = len(call.shape) - 1 if call.name == "ctc_loss" else 1
        node, classes = _before_reordering(graph, graph.made(call.sequence), axis)
        if node is None or node.dim is None or not node.shape or classes >= len(node.shape):
            continue
        dim = node.dim % len(node.shape)
        is_wrong = dim != classes and (dim == 0 or call.name in _OF_LOGARITHMS)
        if is_wrong and node.shape[dim] != node.shape[classes] and min(node.shape[dim], node.shape[classes]) > 1:
            yield call, node, classes


def not_normalised(graph: LossGraph) -> Iterator[tuple[LossCall, Node]]:
    """Losses of logarithms of probabilities that are given the result of a layer as it is."""
    for call in graph.losses():
        node = graph.value_of(graph.made(call.sequence)) if call.name in _OF_LOGARITHMS else None
        if node is not None and _is_of_layer(graph, node) and len(call.shape) > 1 and graph.is_number(call):
            yield call, node


def _is_of_layer(graph: LossGraph, node: Node) -> bool:
    """Whether a node is the product with the weights of a layer; a bias may be added by a node of its own."""
    if node.kind == "AddBackward" and graph.has_weight(node):
        behind = (graph.value_of(graph.nodes[number]) for number in node.behind)
        return any(each is not None and each.kind == "MmBackward" for each in behind)
    return node.kind in _OF_LAYERS


def read_by_rows(graph: LossGraph) -> Iterator[tuple[Node, Node]]:
    """Probabilities over the examples whose logarithms are taken by example, and the node that takes them.

    A cross entropy that is written out takes one class of each row, or adds up a row that is multiplied with targets.
    """
    for node in graph.nodes:
        shape = node.shape or ()
        if node.dim not in (0, -2) or len(shape) != 2 or shape[0] == shape[1] or min(shape) < 2:
            continue
        rows, seen = (shape[:1], (shape[0], 1)), {node.number}
        pending = [(node, node.kind == "LogSoftmaxBackward", False)]
        while pending:
            values, is_log, is_weighed = pending.pop()
            for reader in graph.readers(values):
                has_rows = reader.shape in rows
                if has_rows and reader.kind in _PICKS and (is_log or _has_logarithm(graph, reader)):
                    yield reader, node
                    return
                if has_rows and reader.kind == "SumBackward" and is_log and is_weighed:
                    yield reader, node
                    return
                if reader.shape == shape and reader.number not in seen and not graph.has_weight(reader):
                    seen.add(reader.number)
                    is_target = reader.kind == "MulBackward" and bool(reader.missing)
                    pending.append((reader, is_log or reader.kind == "LogBackward", is_weighed or is_target))


def _has_logarithm(graph: LossGraph, node: Node) -> bool:
    """Whether the logarithm of some values is taken, and of nothing else."""
    shape = node.shape
    while len(readers := graph.readers(node)) == 1 and node.kind != "LogBackward":
        node = readers[0]
        if node.shape is None or len(node.behind) > 1 or math.prod(node.shape) != math.prod(shape or ()):
            return False
    return node.kind == "LogBackward"


def attention_over_batch(graph: LossGraph) -> list[Node]:
    """Softmaxes over the examples of a batch whose results weigh the values of each example in a batched product."""
    examples = {call.shape[0] for call in graph.losses() if call.shape}
    found: list[Node] = []
    for node in _attention_weights(graph):
        shape = node.shape or ()
        # A loss may be given all positions of all examples in one dimension.
        if node.dim in (0, -len(shape)) and shape[0] > 1:
            found += [] if examples.isdisjoint((shape[0], shape[0] * shape[-2])) else [node]
    return found


def attention_over_queries(graph: LossGraph) -> list[Node]:
    """Softmaxes of self-attention over the positions that ask, or over the heads, instead of those that are asked."""
    found: list[Node] = []
    for node in _attention_weights(graph, first=True):
        shape, dim = node.shape or (), (node.dim or 0) % len(node.shape or (0,))
        is_over_others = dim == len(shape) - 2 or 0 < dim < len(shape) - 2
        if is_over_others and shape[dim] > 1 and shape[-1] == shape[-2] > 1 and _is_of_itself(graph, node):
            found.append(node)
    return found


def _attention_weights(graph: LossGraph, *, first: bool = False) -> Iterator[Node]:
    """The softmaxes of three dimensions or more whose results, as they are, are a factor of a batched product."""
    for product in graph.nodes:
        for place, number in product.inputs() if product.kind == "BmmBackward" else ():
            weights = node = graph.nodes[number]
            while len(node.behind) == 1 and node.kind in _KEEPING_ROWS:
                node = graph.nodes[node.behind[0]]
            shape = node.shape or ()
            if node.kind != "SoftmaxBackward" or node.dim is None or len(shape) < 3 or (first and place):
                continue
            if (weights.shape or ())[-2:] == shape[-2:]:
                yield node


def _is_of_itself(graph: LossGraph, node: Node) -> bool:
    """Whether scores are products of values that were computed from the same values, as those of self-attention."""
    while node.behind and node.kind != "BmmBackward":
        node = graph.nodes[node.behind[0]]
    if len(node.behind) != 2:
        return False
    left, right = (graph.below(number) for number in node.behind)
    return any(graph.nodes[number].leaf is None for number in left & right)


def _before_reordering(graph: LossGraph, node: Node | None, axis: int) -> tuple[Node | None, int]:
    """The node that made some values before they were copied or reordered, and where an axis of theirs was there."""
    while node is not None and len(node.behind) == 1:
        behind = graph.nodes[node.behind[0]]
        if node.dims:
            axis = node.dims[axis]
        elif node.kind in VIEWS | _ROWS:
            before, after = behind.shape or (0,), node.shape or (0,)
            if axis != len(after) - 1 or before[-1] != after[-1]:
                return None, axis
            axis = len(before) - 1
        elif node.kind not in _UNCHANGED:
            return node, axis
        node = behind
    return node, axis


def order_of_dims(kind: str, raw: Any, count: int) -> tuple[int, ...]:
    """For an operation that reorders dimensions: which dimension of its input each of its result is."""
    if kind == "PermuteBackward" and hasattr(raw, "_saved_dims"):
        return tuple(signed(dim) % count for dim in raw._saved_dims)
    if kind == "TransposeBackward" and hasattr(raw, "_saved_dim0"):
        order = list(range(count))
        first, second = signed(raw._saved_dim0) % count, signed(raw._saved_dim1) % count
        order[first], order[second] = second, first
        return tuple(order)
    return ()


def signed(dim: int) -> int:
    """A dimension that autograd has saved, which may be a negative number read as one without a sign."""
    return dim - (1 << 64) if dim >= 1 << 63 else dim
