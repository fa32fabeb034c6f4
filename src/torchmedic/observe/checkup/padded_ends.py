"""Where the last step of padded sequences is read, which is padding for all but the longest sequences.

`pad_packed_sequence` copies the packed values into a tensor of padding, block by block: first the steps that all
sequences have, at last the steps of the longest. The graph has one node for each block, so the shapes tell how many
sequences have a value in the last step. No value is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchmedic.observe.checkup.loss_graph import PASSING

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node

_COPY = "torch::autograd::CopySlices"
_KEEPING = frozenset({"IndexSelectBackward", "CloneBackward", "ToCopyBackward"})  # the sequences in another order
_PRODUCTS = frozenset("AddmmBackward MmBackward LinearBackward".split())
_ON_THE_WAY = PASSING | frozenset(
    "CatBackward ReluBackward TanhBackward GeluBackward NativeLayerNormBackward NativeBatchNormBackward "
    "NativeDropoutBackward SliceBackward".split()
)


class PaddedEnd(NamedTuple):
    """A node that reads the last step, how many sequences it gets padding of, and how many there are."""

    node: Node
    padded: int
    sequences: int


def padded_ends(graph: LossGraph) -> Iterator[PaddedEnd]:
    """The nodes that take the last step of padded sequences and give it to a layer."""
    for node in graph.nodes:
        if node.last_of is None or len(node.behind) != 1:
            continue
        made, dim = graph.nodes[node.behind[0]], node.last_of
        while len(made.behind) == 1 and (made.dims or made.kind in _KEEPING or _is_of_features(graph, made)):
            dim = made.dims[dim % len(made.dims)] if made.dims else dim
            made = graph.nodes[made.behind[0]]
        shape = made.shape or ()
        if made.kind != _COPY or len(shape) != 3 or dim % 3 != 0 or shape[1] < 2:
            continue
        blocks = _blocks(graph, made)
        if blocks and _goes_into_layer(graph, node):
            is_reached = sum(steps for steps, _ in blocks) == shape[0]
            padded = shape[1] - (blocks[-1][1] if is_reached else 0)
            if padded:
                yield PaddedEnd(node, padded, shape[1])


def _is_of_features(graph: LossGraph, node: Node) -> bool:
    """Whether a node takes some values of each step of each sequence, as those of one direction."""
    behind = graph.nodes[node.behind[0]].shape or ()
    return node.kind == "SliceBackward" and (node.shape or (0,))[:-1] == behind[:-1]


def _blocks(graph: LossGraph, copy: Node) -> list[tuple[int, int]]:
    """The steps and sequences of each block that was copied, first block first; nothing for other copies.

    The blocks of packed sequences are all parts of one tensor, which they use up.
    """
    found: list[tuple[int, int]] = []
    sources = set[int]()
    rest: Node | None = copy
    while rest is not None and rest.kind == _COPY:
        behind = [graph.nodes[number] for number in rest.behind]
        rest = next((each for each in behind if each.kind == _COPY), None)
        views = [each for each in behind if each is not rest]
        part = graph.nodes[views[0].behind[0]] if len(views) == 1 and views[0].behind else None
        if part is None or part.kind != "SliceBackward" or len(views[0].shape or ()) != 3:
            return []
        steps, sequences, _ = views[0].shape or (0, 0, 0)
        found.insert(0, (steps, sequences))
        sources.update(part.behind)
    packed = graph.nodes[sources.pop()].shape if len(sources) == 1 else None
    widths = [sequences for _, sequences in found]
    is_packed = packed is not None and packed[0] == sum(steps * sequences for steps, sequences in found)
    return found if is_packed and widths == sorted(widths, reverse=True) else []


def _goes_into_layer(graph: LossGraph, node: Node) -> bool:
    """Whether a value goes into a product with weights, and nothing hides parts of it before."""
    pending, seen = [node], {node.number}
    while pending:
        for reader in graph.readers(pending.pop()):
            layer = reader.birth.layer() if reader.birth is not None and reader.birth.layer is not None else None
            if reader.kind in _PRODUCTS:
                return True
            if reader.number not in seen and (reader.kind in _ON_THE_WAY or isinstance(layer, torch.nn.Dropout)):
                seen.add(reader.number)
                pending.append(reader)
    return False
