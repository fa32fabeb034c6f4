"""Terms of a loss that reach only parameters of others than the optimizer that steps next.

The gradients of such a term are of no use to that update. They may be of use to another optimizer, as where two losses
are added and two optimizers step; so it is noted whether another optimizer uses them before they are cleared, or
whether the script itself changes these parameters, as by a step of its own.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from torchmedic.observe.checkup.graph_facts import is_linear

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node

_MAX_TERMS = 32  # of a loss


class ForeignTerm:
    """One term, the parameters that it reaches, and those of the optimizer that stepped.

    Args:
        term: The node of the term.
        whole: The sum.
        leaves: What the term reaches.
        owned: Identities of the parameters of the optimizer.
    """

    def __init__(self, term: Node, whole: Node, leaves: list[torch.Tensor], owned: frozenset[int]) -> None:
        self.term = term
        self.whole = whole
        self.owned = owned
        self.leaves = frozenset(map(id, leaves))
        self.is_used = False  # another optimizer or the script has used the gradients
        self.backwards = 0  # calls of backward since
        self._witness = weakref.ref(min(leaves, key=torch.Tensor.numel))
        self._state = self._look()
        self._values = self._copy()
        self._has_optimizer = False

    def step_begins(self, owned: frozenset[int]) -> None:
        """An optimizer is about to update these parameters."""
        leaf = self._witness()
        self._has_optimizer = self._has_optimizer or id(leaf) in owned
        if leaf is None or id(leaf) not in owned or leaf.grad is None:
            return
        (identity, writes), now = self._state, self._look()
        # Each backward writes once. What is written more often was cleared in between.
        self.is_used = self.is_used or (now[0] == identity and now[1] - writes <= self.backwards)

    def turn_ended(self) -> None:
        """The optimizer without these parameters is about to step again."""
        now = self._copy()
        if not self._has_optimizer and now is not None and self._values is not None:
            self.is_used = self.is_used or not torch.equal(now, self._values)

    def _copy(self) -> torch.Tensor | None:
        leaf = self._witness()
        is_plain = type(leaf) in (torch.nn.Parameter, torch.Tensor)
        return leaf.detach().clone() if leaf is not None and is_plain and leaf.is_cpu else None

    def _look(self) -> tuple[int, int]:
        leaf = self._witness()
        gradient = leaf.grad if leaf is not None else None
        return (0, 0) if gradient is None else (id(gradient), gradient._version)


def foreign_term(graph: LossGraph, owned: frozenset[int]) -> ForeignTerm | None:
    """A term that reaches parameters, and none of these, beside one that reaches some of these."""
    reached: dict[int, tuple[torch.Tensor, ...]] = {}
    pending = [root.node for root in graph.roots if root.node is not None]
    seen: set[int] = set()
    while pending and graph.complete and len(reached) < _MAX_TERMS:
        number = pending.pop()
        node = graph.nodes[number]
        if number in seen or not is_linear(node):
            continue
        seen.add(number)
        pending += node.behind
        if len(node.behind) < 2:
            continue
        for each in node.behind:
            if each not in reached:
                reached[each] = tuple(graph.leaves_below(each))
        mine = {each for each in node.behind if any(id(leaf) in owned for leaf in reached[each])}
        for each in node.behind:
            if mine and each not in mine and reached[each]:
                return ForeignTerm(graph.nodes[each], node, list(reached[each]), owned)
    return None
