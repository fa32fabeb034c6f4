"""A step that is looked at in a replay, right before its backward. The replay puts back all that it changes.

Compiled code has no nodes of its own in the graph, and nothing of ours may be seen while it is made. So the check-up
has the step run once more, eagerly: once to take down the graph, once more where parameters are cut off from the loss,
and once more where a term of the loss has no graph. Any other step is run once more where a weight has a gradient of
exactly 0 in each of several steps (`dead_ends`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from torchmedic.observe.checkup.dead_ends import DeadEnds
from torchmedic.observe.checkup.graph_cuts import GraphCuts
from torchmedic.observe.checkup.graph_facts import partial_sums
from torchmedic.observe.checkup.loss_graph import LossGraph
from torchmedic.observe.checkup.lost_terms import LostTerms
from torchmedic.observe.checkup.node_births import NodeBirths

# Runs the step in a context; gives what backward would be called on, or nothing where the step cannot be run again.
Rerun = Callable[[AbstractContextManager[None]], Sequence[torch.Tensor]]


def eager_graph(rerun: Rerun, key: tuple[str, int], step: int) -> LossGraph | None:
    """The graph behind the loss of a step, as it is without the compiler.

    Args:
        rerun: Runs the step again.
        key: The user's line that calls backward.
        step: Updates so far.
    """
    births = NodeBirths()
    roots = rerun(_noting(births))
    if not roots:
        return None
    graph = LossGraph(births, roots, key, step)
    if partial_sums(graph):
        terms = LostTerms()
        rerun(_watching(terms, key))
        graph.lost_terms = terms
    return graph


def graph_with_dead_ends(rerun: Rerun, key: tuple[str, int], step: int, ends: DeadEnds) -> LossGraph | None:
    """The graph behind the loss of a step, if it has operations that pass no gradient."""
    births = NodeBirths()
    roots = rerun(_noting(births, ends))
    if not roots or not ends.found:
        return None
    graph = LossGraph(births, roots, key, step)
    graph.dead_ends |= ends.of(graph)
    graph.unmoved = ends.unmoved
    return graph


def eager_cuts(rerun: Rerun, parameters: list[torch.Tensor]) -> GraphCuts:
    """Where the parameters are cut off from the loss."""
    cuts = GraphCuts()
    rerun(_armed(cuts, parameters))
    return cuts


@contextlib.contextmanager
def _noting(births: NodeBirths, ends: DeadEnds | None = None) -> Iterator[None]:
    births.arm(modes=torch._C._len_torch_dispatch_stack() + (ends is not None))
    try:
        with ends or contextlib.nullcontext():
            yield
    finally:
        births.disarm()


@contextlib.contextmanager
def _watching(terms: LostTerms, key: tuple[str, int]) -> Iterator[None]:
    terms.watch(key)
    try:
        yield
    finally:
        terms.disarm()


@contextlib.contextmanager
def _armed(cuts: GraphCuts, parameters: list[torch.Tensor]) -> Iterator[None]:
    cuts.arm(parameters)
    try:
        yield
    finally:
        cuts.disarm()
