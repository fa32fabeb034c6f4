"""Whether a language model is to predict the very tokens that it is given: the targets were not moved by a position.

No position of such a model sees a later one, by a mask of its attention or by a recurrence, so it is meant to predict.
Each position sees its own token, and that is its target. What gives back its input on purpose is left out: a model that
is also given the tokens one position earlier, as a decoder is, one that passes fewer values per position on than it was
given, and one that moves or hides positions behind the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchmedic.observe.checkup.normalisations import signed
from torchmedic.observe.checkup.shown_targets import (
    HALF,
    LEAST_MASK,
    LEAST_WEIGHT,
    MAX_TOKENS,
    MIN_LENGTH,
    MIN_TOKENS,
    SOFTMAXES,
    Sight,
    above,
    compared,
    kept,
    layer_of,
    shifts,
    weighs,
)

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node
    from torchmedic.observe.checkup.node_births import LossCall

# These may move values to other positions, or hide some.
_MOVING = frozenset(
    "ConstantPadNdBackward RollBackward FlipBackward torch::autograd::CopySlices IndexBackward IndexSelectBackward "
    "GatherBackward IndexPutBackward ScatterBackward ConvolutionBackward WhereBackward MaskedFillBackward "
    "MaskedScatterBackward AsStridedBackward UnfoldBackward".split()
)


def find(graph: LossGraph, raws: Mapping[Any, int]) -> list[Sight]:
    """The operation that shows each position its own token, if the targets are these tokens."""
    call, given, target = compared(graph, raws)
    tables = [(number, tokens) for number, tokens in given if tokens.dim() == 2 and tokens.numel() == target.numel()]
    if call is None or any(shifts(tokens, target) for _, tokens in given if tokens.is_cpu):
        return []
    for number, tokens in tables:
        is_same = _is_same(tokens, target)
        if is_same is None or (tokens.is_cpu and not bool(is_same)):
            continue
        found = _sights(graph, raws, number, tokens, call, is_same)
        if found:
            return found
    return []


def _is_same(tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """Whether the targets are the tokens, position by position."""
    rows, columns = tokens.shape
    if rows == columns or rows < 2 or not MIN_TOKENS <= tokens.numel() <= MAX_TOKENS or target.device != tokens.device:
        return None
    wanted = target.reshape(tokens.shape)
    is_same = ((wanted == tokens) | (wanted < 0)).all() & ((wanted >= 0).float().mean() > HALF)
    return is_same & (tokens != tokens[:1, :1]).any()


def _sights(
    graph: LossGraph, raws: Mapping[Any, int], number: int, tokens: torch.Tensor, call: LossCall, is_same: torch.Tensor
) -> list[Sight]:
    for dim in (1, 0):
        found = _causal_operations(graph, raws, number, dim, tokens.shape[dim], call, tokens.numel())
        if found:
            is_open = torch.stack([torch.as_tensor(value, device=tokens.device) for _, value in found]).all()
            return [Sight(call, found[0][0], is_same, is_open, later=0)]
    return []


def _causal_operations(
    graph: LossGraph, raws: Mapping[Any, int], number: int, dim: int, length: int, call: LossCall, count: int
) -> list[tuple[Node, Any]]:
    """The operations that combine positions, and whether each hides the later ones; nothing where that is open."""
    if length < MIN_LENGTH:
        return []
    shown = above(graph, number, kept(graph, call, length, count, is_whole=True))
    width = (graph.nodes[number].shape or (0,))[-1]
    found: list[tuple[Node, Any]] = []
    for raw, at in raws.items():
        node = graph.nodes[at]
        if at not in shown:
            continue
        layer, shape = layer_of(node), node.shape or ()
        if isinstance(layer, torch.nn.RNNBase):
            is_narrow = (layer.proj_size or layer.hidden_size) < width or layer.batch_first != (dim == 1)
            if is_narrow or layer.bidirectional:
                return []
            found.append((node, True))
        elif node.kind in _MOVING and shape[-2:] != (length, length):
            return []
        elif node.kind in SOFTMAXES:
            is_last = signed(int(getattr(raw, "_saved_dim", 0))) in (-1, len(shape) - 1)
            if is_last and shape[-2:-1] == (length,) and weighs(graph, node, set(range(len(graph.nodes))) - shown):
                continue  # attention to another sequence, as of a decoder, leaves the positions apart
            if not is_last or shape[-2:] != (length, length) or not weighs(graph, node, shown):
                return []
            found.append((node, _hides_later(raw._saved_result, LEAST_WEIGHT)))
        elif node.kind.startswith("ScaledDotProduct") and shown.isdisjoint(node.behind[1:]):
            continue  # it looks at another sequence
        elif node.kind.startswith("ScaledDotProduct"):
            found.append((node, _is_causal(raw, length)))
    return found


def _is_causal(raw: Any, length: int) -> Any:
    """Whether a fused attention hides the later positions."""
    if raw._saved_query.shape[-2] != length or raw._saved_key.shape[-2] != length:
        return False
    mask = getattr(raw, "_saved_attn_mask", getattr(raw, "_saved_attn_bias", None))
    if mask is None:
        return bool(getattr(raw, "_saved_is_causal", False))
    return _hides_later(mask, LEAST_MASK) if mask.shape[-2:] == (length, length) else False


def _hides_later(table: torch.Tensor, least: float) -> torch.Tensor:
    """Whether no position sees a later one, and most see themselves."""
    is_seen = table.detach() > least
    return ~is_seen.triu(1).any() & (is_seen.diagonal(dim1=-2, dim2=-1).float().mean() > HALF)
