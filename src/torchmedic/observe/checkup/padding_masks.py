"""Attention that hides every token and shows the padding alone: its mask says the opposite of what is meant.

The keys that attention sees are compared with the tokens of an embedding. Padding is the token that the embedding knows
as its padding, or else the one token that is seen, if it fills the ends of sequences of several lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchmedic.observe.checkup.normalisations import signed
from torchmedic.observe.checkup.shown_targets import LEAST_MASK, LEAST_WEIGHT, MAX_TOKENS, MIN_TOKENS, SOFTMAXES

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node

_MAX_WEIGHTS = 1 << 26


class InvertedMask:
    """An attention whose mask may be inverted. The answer is a tensor until it is read."""

    def __init__(self, node: Node, is_inverted: Any) -> None:
        self.node = node
        self.is_inverted = is_inverted


def find(graph: LossGraph, raws: Mapping[Any, int]) -> list[InvertedMask]:
    """The first attention of a graph that was just walked, if it may see nothing but padding."""
    tables = [raw for raw, number in raws.items() if graph.nodes[number].kind == "EmbeddingBackward"]
    tables = [raw for raw in tables if hasattr(raw, "_saved_padding_idx")]  # not of a user's own function
    given = [(raw._saved_indices, signed(int(raw._saved_padding_idx))) for raw in tables]
    given = [(tokens, padding) for tokens, padding in given if tokens.dim() == 2 and len(tokens) > 1]
    given = [(tokens, padding) for tokens, padding in given if MIN_TOKENS <= tokens.numel() <= MAX_TOKENS]
    if not given:
        return []
    for tokens, padding in given:
        for node, is_seen in seen_keys(graph, raws, tokens):
            is_inverted = _is_inverted(tokens, is_seen, padding)
            if not tokens.is_cpu or bool(is_inverted):
                return [InvertedMask(node, is_inverted)]
    return []


def seen_keys(graph: LossGraph, raws: Mapping[Any, int], tokens: torch.Tensor) -> Iterator[tuple[Node, torch.Tensor]]:
    """Each attention over sequences of tokens, the first one first, and which of them it sees."""
    rows, length = tokens.shape
    for raw, number in sorted(raws.items(), key=lambda pair: graph.nodes[pair[1]].sequence):
        table, least = _shown(graph.nodes[number].kind, raw)
        if table is None or table.dim() < 3 or table.shape[-1] != length or len(table) % rows or len(table) < 2:
            continue
        yield graph.nodes[number], (table.detach() > least).reshape(rows, -1, length).any(1)


def _shown(kind: str, raw: Any) -> tuple[Any, float]:
    """What tells which keys an attention sees, and the least value of a key that is seen; None for other nodes."""
    table, least = None, LEAST_WEIGHT
    if kind in SOFTMAXES:
        table = getattr(raw, "_saved_result", None)
    elif kind.startswith("ScaledDotProduct"):
        table, least = getattr(raw, "_saved_attn_mask", getattr(raw, "_saved_attn_bias", None)), LEAST_MASK
    return (table, least) if table is not None and table.numel() <= _MAX_WEIGHTS else (None, least)


def _is_inverted(tokens: torch.Tensor, is_seen: torch.Tensor, padding: int) -> torch.Tensor:
    """Whether exactly the padding is seen, which follows the tokens of sequences of several lengths."""
    known = torch.where(is_seen, tokens, -1).amax() if padding < 0 else padding
    is_padding = tokens == known
    counts = is_padding.sum(1)
    ends = ~(is_padding[:, :-1] & ~is_padding[:, 1:]).any()
    return (is_seen == is_padding).all() & ends & (counts.amin() < counts.amax()) & (counts.amin() < tokens.shape[1])
