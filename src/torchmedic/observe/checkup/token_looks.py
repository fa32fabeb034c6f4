"""What the tokens that a model was given tell of its targets and of its attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torchmedic.observe.checkup import padded_targets, padding_masks, same_tokens, shown_targets

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph


class TokenLooks:
    """Each look at the tokens of one graph. The numbers are tensors until they are read."""

    def __init__(self) -> None:
        self.sights: list[shown_targets.Sight] = []
        self.inverted_masks: list[padding_masks.InvertedMask] = []
        self.padded: list[padded_targets.PaddedTargets] = []

    def take(self, graph: LossGraph, raws: Mapping[Any, int]) -> None:
        """Look at a graph that was just walked."""
        with suppress(RuntimeError):  # a tensor of the graph is freed, or overwritten since
            self.sights = [*shown_targets.find(graph, raws), *same_tokens.find(graph, raws)]
            self.inverted_masks = padding_masks.find(graph, raws)
            self.padded = padded_targets.find(graph, raws)

    def numbers(self) -> Iterator[tuple[Any, str]]:
        """Whose attributes are numbers that may be on their device, and their names."""
        yield from ((sight, name) for sight in self.sights for name in ("is_shifted", "is_open"))
        yield from ((mask, "is_inverted") for mask in self.inverted_masks)
        yield from ((padded, "share") for padded in self.padded)
