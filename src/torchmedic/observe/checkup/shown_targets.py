"""Whether a model is shown the tokens that it is to predict: the next ones of a sequence.

The targets of a language model are its input, one position later. Then no position may see a later one. What each
position sees is in the graph: the weights of attention, the mask that a fused attention was given, or a recurrence that
runs in both directions. A way back to the tokens that passes a single vector for the whole sequence, as in an
autoencoder, does not count, nor do targets that two sequences show, as in a model that gives back its input. Positions
whose targets the loss leaves out, as the prefix that a model is given as a whole, may see each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchmedic.observe.checkup.normalisations import signed

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node
    from torchmedic.observe.checkup.node_births import LossCall

_MIN_LENGTH = 6
_MIN_TOKENS = 24
_MAX_TOKENS = 1 << 22
_LEAST_WEIGHT = 1e-20  # of attention: what a mask hides has 0
_LEAST_MASK = -1e3  # what is added to a score that is not hidden
_HALF = 0.5
_SOFTMAXES = ("SoftmaxBackward", "SafeSoftmaxBackward")
_BETWEEN = frozenset(  # attention weights and their product with the values
    "ViewBackward UnsafeViewBackward ReshapeAliasBackward ExpandBackward CloneBackward NativeDropoutBackward "
    "ToCopyBackward".split()
)
_PRODUCTS = frozenset({"AddmmBackward", "MmBackward", "BmmBackward", "LinearBackward"})
_NORMS_OVER_ITEMS = ("NativeBatchNormBackward", "CudnnBatchNormBackward")


class Sight:
    """One operation by which predictions may see later tokens. The numbers are tensors until they are read."""

    def __init__(self, call: LossCall, node: Node, is_shifted: Any, is_open: Any) -> None:
        self.call = call
        self.node = node
        self.is_shifted = is_shifted  # whether the targets are the tokens of the input, one position later
        self.is_open = is_open  # whether a position sees the next one


def find(graph: LossGraph, raws: Mapping[Any, int]) -> list[Sight]:
    """What may show the targets of a graph that was just walked."""
    tables = [raw for raw, number in raws.items() if graph.nodes[number].kind == "EmbeddingBackward"]
    losses = [raw for raw, number in raws.items() if graph.nodes[number].kind.startswith("NllLoss")]
    birth = graph.nodes[raws[losses[0]]].birth if len(losses) == 1 and tables else None
    if birth is None or birth.loss is None:
        return []
    call, target = birth.loss, losses[0]._saved_target
    given = [(raws[raw], raw._saved_indices) for raw in tables]
    known = [(number, *shift) for number, tokens in given for shift in _shifts(tokens, target)]
    if len(known) != 1:
        return []
    number, is_shifted, length, counted = known[0]
    count = next(tokens.numel() for at, tokens in given if at == number)
    sequences = count // length
    if sequences in (length, length - 1) and any(isinstance(layer_of(node), torch.nn.RNNBase) for node in graph.nodes):
        return []  # a hidden state has an entry per sequence, and as many as there are positions
    kept = _kept(graph, call, length, count)
    shown = _above(graph, number, kept)
    found: list[Sight] = []
    for raw, at in raws.items():
        node = graph.nodes[at]
        if at in shown:
            is_open = _openness(graph, node, raw, counted, shown)
            if is_open is not None:
                found.append(Sight(call, node, is_shifted, is_open))
    return found


def _shifts(tokens: torch.Tensor, target: torch.Tensor) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
    """For each dimension that may be that of the positions: whether targets are the next tokens, and their length.

    The third value tells, for each sequence, which positions but for the last one have a target.
    """
    if tokens.dim() != 2 or not _MIN_TOKENS <= tokens.numel() <= _MAX_TOKENS or tokens.device != target.device:
        return []
    found: list[tuple[torch.Tensor, int, torch.Tensor]] = []
    for dim in (0, 1):
        length = tokens.shape[dim]
        before, after = tokens.narrow(dim, 0, length - 1), tokens.narrow(dim, 1, length - 1)
        if length < _MIN_LENGTH:
            continue
        if target.numel() == tokens.numel():
            wanted = target.reshape(tokens.shape).narrow(dim, 0, length - 1)
        elif target.numel() == after.numel():
            wanted = target.reshape(after.shape)
        else:
            continue
        is_next = ((wanted == after) | (wanted < 0)).all() & (wanted >= 0).any()
        found.append((is_next & (before != after).any(), length, (wanted >= 0).movedim(dim, 1)))
    return [each for each in found if bool(each[0])] if tokens.is_cpu else found[-1:]


def _kept(graph: LossGraph, call: LossCall, length: int, count: int) -> set[int]:
    """The nodes that lead to the scores by values that have an entry per position, and not one for a whole sequence."""
    start = graph.made(call.sequence)
    pending: list[tuple[int, Any]] = [(start.number, None)] if start is not None else []
    seen = set[int]()
    flat = (
        (count,),
        (count - count // length,),
    )  # all positions in one dimension, or all but the last of each sequence
    while pending:
        number, reader = pending.pop()
        node = graph.nodes[number]
        shape, layer = node.shape, layer_of(node)
        is_kept = shape is None or (len(shape) > 2 and not {length, length - 1}.isdisjoint(shape)) or shape[:1] in flat
        is_inside = isinstance(layer, torch.nn.RNNBase) and layer is reader  # computes one position after the other
        if number in seen or not (is_kept or is_inside):
            continue
        if node.kind in _NORMS_OVER_ITEMS:
            return set()
        seen.add(number)
        pending += [(behind, layer) for behind in node.behind]
    return seen


def _above(graph: LossGraph, number: int, kept: set[int]) -> set[int]:
    """The nodes among some whose values are computed from those of a node by way of the others."""
    pending, seen = [number], set[int]()
    while pending:
        each = pending.pop()
        if each in kept and each not in seen:
            seen.add(each)
            pending += [reader.number for reader in graph.readers(graph.nodes[each])]
    return seen


def _openness(graph: LossGraph, node: Node, raw: Any, counted: torch.Tensor, shown: set[int]) -> Any:
    """Whether a node shows later positions to each position; None if it cannot.

    Args:
        graph: The graph.
        node: The node.
        raw: The same as torch has it.
        counted: The positions of each sequence that have a target, without the last one.
        shown: The nodes whose values are computed from the tokens, position by position.
    """
    layer, length = layer_of(node), counted.shape[1] + 1
    if isinstance(layer, torch.nn.RNNBase):
        return True if layer.bidirectional and _gives_both_directions(graph, node, layer) else None
    if node.kind in _SOFTMAXES and signed(int(raw._saved_dim)) in (-1, len(node.shape or ()) - 1):
        is_square = (node.shape or ())[-2:] == (length, length)
        return (
            _sees_next(raw._saved_result, _LEAST_WEIGHT, counted) if is_square and _weighs(graph, node, shown) else None
        )
    if not node.kind.startswith("ScaledDotProduct") or len(node.behind) < 3:
        return None
    if node.behind[1] not in shown or getattr(raw, "_saved_is_causal", True):
        return None
    query, key = raw._saved_query, raw._saved_key
    if query.shape[-2] != length or key.shape[-2] != length:
        return None
    mask = getattr(raw, "_saved_attn_mask", getattr(raw, "_saved_attn_bias", None))
    if mask is None or mask.shape[-2] == 1:
        return True
    return _sees_next(mask, _LEAST_MASK, counted) if mask.shape[-2:] == (length, length) else None


def _gives_both_directions(graph: LossGraph, node: Node, layer: torch.nn.RNNBase) -> bool:
    """Whether a product takes what both directions made, and not one half of it, as in two models of one layer."""
    width = 2 * (layer.proj_size or layer.hidden_size)
    pending, seen = [node], set[int]()
    while pending:
        each = pending.pop()
        if each.shape is None or each.shape[-1:] != (width,) or each.number in seen:
            continue
        seen.add(each.number)
        readers = list(graph.readers(each))
        if any(reader.kind in _PRODUCTS for reader in readers):
            return True
        pending += readers
    return False


def layer_of(node: Node) -> torch.nn.Module | None:
    return node.birth.layer() if node.birth is not None and node.birth.layer is not None else None


def _weighs(graph: LossGraph, node: Node, shown: set[int]) -> bool:
    """Whether attention weights, as they are, are a factor of a product with values that the tokens made."""
    for reader in graph.readers(node):
        if reader.kind in _BETWEEN or _is_dropout(node, reader):
            if _weighs(graph, reader, shown):
                return True
        elif reader.kind in ("BmmBackward", "MmBackward") and len(reader.behind) == 2:
            other = [number for number in reader.behind if number != node.number]
            if other and other[0] in shown:
                return True
    return False


def _is_dropout(node: Node, reader: Node) -> bool:
    """Whether a product of attention weights is a dropout: of a layer, or of the very call that made the weights."""
    if reader.kind not in ("MulBackward", "DivBackward") or node.birth is None or reader.birth is None:
        return False
    return isinstance(layer_of(reader), torch.nn.Dropout) or reader.birth.sites[:1] == node.birth.sites[:1] != ()


def _sees_next(table: torch.Tensor, least: float, counted: torch.Tensor) -> torch.Tensor:
    """Whether most positions with a target see the next one, some of the last quarter among them."""
    steps = table.detach().diagonal(offset=1, dim1=-2, dim2=-1) > least
    sequences, between = counted.shape
    if steps.numel() // between % sequences:  # one table for all sequences
        sequences, counted = 1, counted.any(0)
    steps, counted = torch.broadcast_tensors(steps.reshape(sequences, -1, between), counted.reshape(-1, 1, between))
    seen = steps & counted
    is_most: torch.Tensor = seen.sum() > _HALF * counted.sum()
    is_late: torch.Tensor = seen[..., -(between // 4) :].any()
    return is_most.logical_and(is_late)
