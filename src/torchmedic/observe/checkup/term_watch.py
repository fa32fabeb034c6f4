"""The search for terms of a loss that train nothing: which loss is suspected, and when its terms are watched.

A loss is suspected if a term of it has no graph, if a distribution has a part in it, which may be sampled without one,
or if a term reaches no parameter of the optimizer that steps next.
The second needs a whole turn, as another optimizer may use those gradients. Then the terms are watched for one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torchmedic.observe.checkup.foreign_terms import foreign_term
from torchmedic.observe.checkup.graph_facts import partial_sums
from torchmedic.observe.checkup.loss_graph import LossGraph
from torchmedic.observe.checkup.lost_terms import LostTerms, gradient_call
from torchmedic.observe.step.tensors import parameters_of

_MAX_TURN_STEPS = 200  # until an optimizer has its next turn


class TermWatch:
    """Fed by the check-up.

    Args:
        judge: Takes the graphs of a loss whose terms were watched, and the frame of its backward.
    """

    def __init__(self, judge: Callable[[Sequence[LossGraph], FrameType | None], None]) -> None:
        self._judge = judge
        self._terms = LostTerms()
        self._suspect: LossGraph | None = None
        self._foreign: LossGraph | None = None  # a loss with a term for others than the optimizer that stepped
        self._rootless: LossGraph | None = None  # a loss without a graph: judged once it is known what cut it off
        self._rootless_key: tuple[str, int] | None = None

    @property
    def armed(self) -> bool:
        return self._terms.armed

    def disarm(self) -> None:
        self._terms.disarm()

    def is_open(self, steps: int) -> bool:
        """Whether a loss is suspected, and nothing was said of it yet."""
        foreign = self._foreign.foreign if self._foreign is not None else None
        awaits_turn = foreign is not None and not foreign.is_used and steps < _MAX_TURN_STEPS
        return not self._terms.done and (self._suspect is not None or awaits_turn)

    def watch(self) -> None:
        """Watch the terms of the suspected loss in the next step."""
        if self._suspect is not None:
            self._terms.watch(self._suspect.key)

    def judged_now(self, graphs: Sequence[LossGraph]) -> list[LossGraph]:
        """All but the first loss without a graph, which is judged in the next step, and the same loss again."""
        if self._suspect is None and not self._terms.done:
            self._suspect = self._rootless = next((graph for graph in graphs if _is_rootless(graph)), None)
            self._rootless_key = self._suspect.key if self._suspect is not None else None
        return [graph for graph in graphs if not _is_rootless(graph) or graph.key != self._rootless_key]

    def settled(self, graphs: Sequence[LossGraph]) -> None:
        """Graphs were looked at."""
        if self._suspect is None:
            self._suspect = next((graph for graph in graphs if partial_sums(graph) or graph.has_distributions), None)

    def exiting(self) -> None:
        """The script ends: nothing more will be known."""
        self._judge_rootless(None)

    def _judge_rootless(self, frame: FrameType | None) -> None:
        graph, self._rootless = self._rootless, None
        if graph is not None:
            self._judge([graph], frame)

    def backward_begins(self, roots: Sequence[Any], key: tuple[str, int], frame: FrameType) -> None:
        if self._foreign is not None and self._foreign.foreign is not None:
            self._foreign.foreign.backwards += 1
        if not self._terms.armed:
            return
        asking = gradient_call(frame)
        if asking is not None:
            self._terms.gradients_asked(roots, asking)
        elif self._terms.backward_begins(key) and self._suspect is not None:
            self._rootless = None
            self._suspect.lost_terms = self._terms
            self._judge([self._suspect], frame)
        elif self._terms.done:
            self._judge_rootless(frame)

    def step_begins(self, optimizer: Any, fresh: Sequence[LossGraph]) -> None:
        """An optimizer steps, after the calls of backward that these graphs are of."""
        self._terms.turn_ended()
        if self._terms.done or (self._foreign is None and not fresh):
            return
        owned = frozenset(map(id, parameters_of(optimizer)))
        known = self._foreign.foreign if self._foreign is not None else None
        if known is None:
            for graph in fresh:
                graph.foreign = foreign_term(graph, owned)
            self._foreign = next((graph for graph in fresh if graph.foreign is not None), None)
        elif known.owned != owned:
            known.step_begins(owned)
        elif not known.is_used:
            known.turn_ended()
            self._suspect = self._suspect or (None if known.is_used else self._foreign)


def _is_rootless(graph: LossGraph) -> bool:
    """Whether backward was called on single numbers without a graph."""
    return bool(graph.roots) and all(root.node is None and root.size == 1 for root in graph.roots)
