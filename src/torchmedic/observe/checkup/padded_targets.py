"""How many targets of a loss over classes are those of padding: the model is trained to predict padding from padding.

The targets are compared with the tokens of an embedding, position by position. Padding is the token that the embedding
knows as its padding, or else the one token that attention hides, if it fills the ends of sequences of several lengths.
A model that passes one vector for a whole sequence on, as an autoencoder does, is left out: its decoder learns from
the padding where a sequence ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchmedic.observe.checkup.normalisations import signed
from torchmedic.observe.checkup.padding_masks import seen_keys
from torchmedic.observe.checkup.shown_targets import MAX_TOKENS, MIN_LENGTH, MIN_TOKENS, compared, kept

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node
    from torchmedic.observe.checkup.node_births import LossCall

MIN_SHARE = 0.1  # of the targets that count
_NO_REDUCTION = 0


class PaddedTargets:
    """A loss that may count padding. The share is a tensor until it is read."""

    def __init__(self, call: LossCall, node: Node, share: Any) -> None:
        self.call = call
        self.node = node  # the loss
        self.share = share  # of the targets that count: those of padding


def find(graph: LossGraph, raws: Mapping[Any, int]) -> list[PaddedTargets]:
    """The loss of a graph that was just walked, if it may count padding."""
    call, given, target = compared(graph, raws)
    if call is None:
        return []
    loss, number = next((raw, at) for raw, at in raws.items() if graph.nodes[at].kind.startswith("NllLoss"))
    if int(getattr(loss, "_saved_reduction", _NO_REDUCTION)) == _NO_REDUCTION:
        return []  # what follows may leave out the padding
    counted = target != signed(int(loss._saved_ignore_index))
    weight = loss._saved_weight
    if weight is not None:
        counted &= weight[target.clamp(0, len(weight) - 1)] != 0
    embeddings = {at: raw for raw, at in raws.items() if graph.nodes[at].kind == "EmbeddingBackward"}
    shares: list[torch.Tensor] = []
    for at, tokens in given:
        if tokens.dim() != 2 or not MIN_TOKENS <= tokens.numel() <= MAX_TOKENS or tokens.device != target.device:
            continue
        for dim in (1, 0):
            length = tokens.shape[dim]
            if length >= MIN_LENGTH and at in kept(graph, call, length, tokens.numel()):
                rows = tokens if dim else tokens.T
                for is_padding in _paddings(graph, raws, embeddings[at], rows):
                    share = _share(is_padding, target, counted, dim)
                    shares += [share] if share is not None else []
    return [PaddedTargets(call, graph.nodes[number], torch.stack(shares).amax())] if shares else []


def _paddings(
    graph: LossGraph, raws: Mapping[Any, int], embedding: Any, tokens: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Which tokens may be padding; nowhere, if these are not the ends of sequences of several lengths."""
    padding = signed(int(getattr(embedding, "_saved_padding_idx", -1)))
    if padding >= 0:
        yield _at_ends(tokens == padding)
        return
    for _, is_seen in seen_keys(graph, raws, tokens):
        known = torch.where(is_seen, -1, tokens).amax()
        yield _at_ends(~is_seen) & (is_seen | (tokens == known)).all()
        return


def _at_ends(is_padding: torch.Tensor) -> torch.Tensor:
    """The positions of padding that fill the ends, or the beginnings, of sequences of several lengths; else none."""
    counts = is_padding.sum(1)
    before, after = is_padding[:, :-1], is_padding[:, 1:]
    is_at_ends = ~(before & ~after).any() | ~(~before & after).any()
    return is_padding & is_at_ends & (counts.amin() < counts.amax()) & (counts.amin() < is_padding.shape[1])


def _share(is_padding: torch.Tensor, target: torch.Tensor, counted: torch.Tensor, dim: int) -> torch.Tensor | None:
    """The share of the targets that are predicted from padding, if all of these are the same class."""
    sequences, length = is_padding.shape
    given = target.numel() // sequences  # targets of a sequence
    if given * sequences != target.numel() or not length - 1 <= given <= length:
        return None
    sizes = (sequences, given) if dim else (given, sequences)
    wanted, counts = target.reshape(sizes), counted.reshape(sizes)
    if not dim:
        wanted, counts = wanted.T, counts.T
    in_vain = is_padding[:, :given] & counts
    largest = torch.where(in_vain, wanted, wanted.amin()).amax()
    in_vain = in_vain & (wanted == largest)
    is_one = in_vain.sum() == (is_padding[:, :given] & counts).sum()
    return torch.where(is_one, in_vain.sum() / counts.sum().clamp_min(1), 0.0)
