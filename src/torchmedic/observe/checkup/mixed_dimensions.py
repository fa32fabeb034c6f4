"""Where a graph mixes up examples, positions and classes: by a view that should transpose, or by a wrong layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchmedic.observe.checkup.normalisations import VIEWS

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node

_CLASSES_FIRST = frozenset({"ConvolutionBackward", "MkldnnConvolutionBackward", "CudnnConvolutionBackward"})
_OF_CLASSES = ("nll_loss", "cross_entropy")


def mixing_views(graph: LossGraph) -> Iterator[tuple[Node, tuple[int, ...], tuple[int, ...], bool]]:
    """Views that exchange the sizes of dimensions, the shapes before and after, and whether a loss is given the result.

    Other views are left alone unless the sizes show that they move the examples of the batch to another dimension.
    """
    given = {node.number for call in graph.losses() if call.name in _OF_CLASSES if (node := graph.made(call.sequence))}
    examples = rows(graph)
    for node in graph.nodes:
        if node.kind not in VIEWS or node.birth is None or node.birth.layer is not None or not node.birth.sites:
            continue
        cut = _cut_into_rows(graph, node) if node.number in given else None
        source = cut or _transposed(graph, node)
        if source is None:
            continue
        before, after = _sizes(source), _sizes(node)
        is_moved = (
            examples is not None and before.count(examples) == 1 and before.index(examples) != after.index(examples)
        )
        if cut or is_moved or node.number in given:
            yield node, source.shape or (), node.shape or (), node.number in given


def _cut_into_rows(graph: LossGraph, node: Node) -> Node | None:
    """What a view for a loss cuts into rows of as many values as there are classes, though the classes stand first.

    A convolution has put them there, or a transposition: (examples, classes, positions).
    """
    source = graph.nodes[node.behind[0]] if len(node.behind) == 1 else None
    before, after = (source.shape or () if source is not None else ()), node.shape or ()
    if source is None or len(before) < 3 or len(after) != 2 or before[1] != after[1] or before[-1] == after[1]:
        return None
    if math.prod(before[2:]) == 1:
        return None  # one position
    made = source
    while made.kind not in _CLASSES_FIRST and not made.dims and len(made.behind) == 1:
        behind = graph.nodes[made.behind[0]]
        if (behind.shape or ())[:2] != before[:2]:
            return None
        made = behind
    return (
        source
        if made.kind in _CLASSES_FIRST or (len(made.dims) == len(before) and made.dims[1] == len(before) - 1)
        else None
    )


def merged_heads(graph: LossGraph) -> Iterator[tuple[Node, Node]]:
    """Views that join the heads of an attention while the heads stand before the positions, and what they are made of.

    The step itself has moved the heads there: it split (batch, positions, heads, width) off and transposed it. The view
    gives the shape (batch, positions, heads * width) all the same. One that another view takes back does no harm.
    """
    for node in graph.nodes:
        source = graph.nodes[node.behind[0]] if node.kind in VIEWS and len(node.behind) == 1 else None
        if source is None or len(source.shape or ()) != 4 or node.birth is None or not node.birth.sites:
            continue
        batch, heads, positions, width = source.shape or (0, 0, 0, 0)
        if node.shape != (batch, positions, heads * width) or 1 in (heads, positions) or heads == positions:
            continue
        is_taken_back = any(
            each.kind in VIEWS and node.number in each.behind and each.shape == source.shape for each in graph.nodes
        )
        below = (graph.nodes[number] for number in graph.below(source.number))
        if not is_taken_back and any(_moves(graph, each, heads, positions) for each in below):
            yield node, source


def _moves(graph: LossGraph, node: Node, heads: int, positions: int) -> bool:
    """Whether a transposition puts the dimension of the heads before that of the positions."""
    before = graph.nodes[node.behind[0]].shape if node.dims and node.behind else None
    if not before or not node.shape or not {heads, positions} <= {*before} & {*node.shape}:
        return False
    return before.index(positions) < before.index(heads) and node.shape.index(heads) < node.shape.index(positions)


def _transposed(graph: LossGraph, node: Node) -> Node | None:
    """What a view was made of, before other views, if the view has the same sizes in another order."""
    behind = node
    while behind.kind in VIEWS and len(behind.behind) == 1:
        behind = graph.nodes[behind.behind[0]]
        if behind.leaf is not None or _sizes(behind) == _sizes(node):
            return None
        if sorted(_sizes(behind)) == sorted(_sizes(node)):
            return None if _is_free(graph, behind, _sizes(node)) else behind
    return None


def _is_free(graph: LossGraph, source: Node, after: list[int]) -> bool:
    """Whether the exchanged dimensions are those of one row of a layer's outputs, which have no order of their own."""
    before = _sizes(source)
    kept = next(place for place, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
    row = math.prod(before[kept:])
    while source.kind in VIEWS and len(source.behind) == 1:
        source = graph.nodes[source.behind[0]]
    return _sizes(source) == [*before[:kept], row]


def _sizes(node: Node) -> list[int]:
    return [size for size in node.shape or () if size != 1]


def layers_with_wrong_layout(graph: LossGraph) -> Iterator[tuple[torch.nn.Module, Node]]:
    """Layers that take the positions first and were given the examples first, as the targets of the losses show.

    A second layer of the same kind with the other layout shows that the script goes along both dimensions on purpose.
    """
    found = list(_layers_given_examples_first(graph))
    kinds_along_positions = {type(layer) for layer, _ in found if layer.batch_first}
    for layer, node in found:
        if not layer.batch_first and type(layer) not in kinds_along_positions:
            yield layer, node


def _layers_given_examples_first(graph: LossGraph) -> Iterator[tuple[Any, Node]]:
    examples = rows(graph)
    for node in graph.nodes if examples is not None else ():
        layer = node.birth.layer() if node.birth is not None and node.birth.layer is not None else None
        shape = node.shape or ()
        if len(shape) != 3 or shape[0] != examples or shape[1] in (1, examples) or layer is None:
            continue
        if any(shape[1] in call.target_shape[1:] for call in graph.losses() if call.target_shape):
            continue  # a target for each step: the first dimension may be that of the steps
        if isinstance(layer, torch.nn.RNNBase):
            width = (getattr(layer, "proj_size", 0) or layer.hidden_size) * (2 if layer.bidirectional else 1)
        elif isinstance(layer, torch.nn.MultiheadAttention) and layer.num_heads > 1:
            width = layer.embed_dim
        else:
            continue
        if shape[2] == width:
            yield layer, node


def takes_last(graph: LossGraph, made: Node) -> bool:
    """Whether only the last element of the second dimension of a result is used, as the last step of a sequence is.

    If the second dimension were that of the examples, the results of all others would be computed in vain.
    """
    values = {id(made), id(graph.value_of(made))}
    users = [
        node
        for node in graph.nodes
        if id(node) not in values
        and any(id(graph.value_of(graph.nodes[number])) in values for number in node.behind)
        and id(graph.value_of(node)) not in values
    ]
    return bool(users) and all(node.last_of == 1 for node in users)


def rows(graph: LossGraph) -> int | None:
    """How many examples the losses of a graph compare with a target; None where that is open."""
    found = {call.target_shape[0] for call in graph.losses() if call.target_shape and call.shape}
    same = all(call.shape[0] == call.target_shape[0] for call in graph.losses() if call.target_shape and call.shape)
    return found.pop() if len(found) == 1 and same and max(found) > 1 else None
