"""The terms of a policy gradient in the graph of a loss: log-probabilities times an advantage, and an entropy.

The nodes that `log_prob` and `entropy` of a distribution build know it (`Birth.method`). An entropy that the loss adds
is made smaller by training. An advantage with a graph is made larger or smaller to please the policy term.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from torchmedic.observe.checkup.graph_facts import is_linear

if TYPE_CHECKING:
    from torchmedic.observe.checkup.loss_graph import LossGraph, Node

_MAX_BETWEEN = 24  # nodes between a product and what it multiplies
_MORE_LINEAR = frozenset("CatBackward SelectBackward SliceBackward IndexBackward ExpandBackward".split())
_OF_LAYER = frozenset(["AddmmBackward", "MmBackward", "MvBackward", "DotBackward"])
# What may stand between a log-probability and its product with an advantage.
_OF_RATIO = frozenset("ExpBackward MinimumBackward ClampBackward ClampMinBackward ClampMaxBackward".split())


class PolicyTerm(NamedTuple):
    """A product of log-probabilities, or of a ratio of probabilities, with `other`, which may have no node."""

    product: Node
    other: Node | None


def are_remarkable(graph: LossGraph) -> bool:
    return (
        bool(added_entropies(graph) or added_surrogates(graph))
        or any(advantages_with_graph(graph))
        or any(probabilities_as_logits(graph))
    )


def probabilities_as_logits(graph: LossGraph) -> Iterator[tuple[Node, Node]]:
    """The softmaxes whose results a distribution was given as `logits`, and the node that normalises them there."""
    for node in graph.nodes:
        if node.kind == "LogsumexpBackward" and node.made_by == "__init__":
            given = graph.value_of(graph.nodes[node.behind[0]])
            if given is not None and given.kind == "SoftmaxBackward":
                yield given, node


def policy_terms(graph: LossGraph) -> list[PolicyTerm]:
    found: list[PolicyTerm] = []
    for node in graph.nodes:
        if node.kind != "MulBackward" or node.factor is not None:
            continue
        sides = [graph.nodes[number] for number in node.behind]
        scored = [side for side in sides if any(each.made_by == "log_prob" for each in _near(graph, side))]
        if len(scored) == 1:
            found.append(PolicyTerm(node, next((side for side in sides if side is not scored[0]), None)))
    return found


def advantages_with_graph(graph: LossGraph) -> Iterator[PolicyTerm]:
    """Policy terms whose other factor is a difference to an estimate that is trained, as `returns - values` is."""
    for term in policy_terms(graph):
        if term.other is None:
            continue
        near = list(_near(graph, term.other))
        differences = [node for node in near if node.kind in ("SubBackward", "RsubBackward")]
        # `1 - gate` is a difference from a number as well; an estimate is not bounded.
        from_number = any(node.kind in _OF_LAYER for node in near)
        is_difference = any(node.missing or (len(node.behind) == 1 and from_number) for node in differences)
        is_other = not any(node.made_by for node in near)  # than the distribution itself
        if is_difference and is_other and any(leaf.dim() > 1 for leaf in graph.leaves_below(term.other.number)):
            yield term


def added_entropies(graph: LossGraph) -> list[Node]:
    """The entropies that the loss adds, while it subtracts log-probabilities of the same outputs times an advantage.

    Where the products are added, the value is an objective: it is made large, and so is its entropy. An entropy of
    other outputs may be made small on purpose, as that of examples without a label.
    """
    products = {term.product.number for term in policy_terms(graph)}
    roots = [(root.node, 1) for root in graph.roots if root.node is not None and root.size == 1]
    added: list[Node] = []
    scored: list[Node] = []
    for node, sign in _signed(graph, roots):
        if node.made_by == "entropy":
            added += [node] if sign > 0 else []
        elif node.number in products:
            sides = [(number, sign) for number in node.behind]
            scored += [each for each, turned in _signed(graph, sides) if each.made_by == "log_prob" and turned < 0]
    of_policy = set[int]().union(*(_computed(graph, each) for each in scored)) if added else set()
    return [node for node in added if not of_policy.isdisjoint(_computed(graph, node))]


def added_surrogates(graph: LossGraph) -> list[Node]:
    """The smaller of two products of a policy ratio with an advantage, where the loss adds it.

    The smaller one is a lower bound, as of PPO, and only makes sense for what is made large. A bound for what is made
    small takes the larger of two negated products.
    """
    products = {term.product.number for term in policy_terms(graph)}
    roots = [(root.node, 1) for root in graph.roots if root.node is not None and root.size == 1]
    return [
        node
        for node, sign in _signed(graph, roots)
        if sign > 0 and node.kind == "MinimumBackward" and len(node.behind) == 2 and products.issuperset(node.behind)
    ]


def _computed(graph: LossGraph, node: Node) -> set[int]:
    """The numbers of a node and of all nodes below it but for the leaves."""
    pending, seen = [node.number], set[int]()
    while pending:
        number = pending.pop()
        if number not in seen and graph.nodes[number].behind:
            seen.add(number)
            pending += graph.nodes[number].behind
    return seen


def _signed(graph: LossGraph, pending: list[tuple[int, int]]) -> Iterator[tuple[Node, int]]:
    """The nodes that lead to some nodes by sums, factors and the ratio of a policy, with the sign of their effect."""
    seen: set[tuple[int, int]] = set()
    while pending:
        number, sign = pending.pop()
        if (number, sign) in seen:
            continue
        seen.add((number, sign))
        node = graph.nodes[number]
        yield node, sign
        if node.made_by or node.mixed:
            continue
        if is_linear(node) or node.kind in _MORE_LINEAR or node.kind in _OF_RATIO:
            turned = _turned(node)
            pending += [(later, -sign if place in turned else sign) for place, later in node.inputs()]


def _turned(node: Node) -> tuple[int, ...]:
    """The positions of the inputs that count with the opposite sign."""
    if node.kind == "NegBackward" or (node.factor is not None and node.factor < 0):
        return (0, 1)
    return {"SubBackward": (1,), "RsubBackward": (0,)}.get(node.kind, ())


def _near(graph: LossGraph, start: Node) -> Iterator[Node]:
    """The nodes that lead to a value by sums, factors and the ratio of a policy; an end that a distribution made."""
    pending, seen = [start.number], set[int]()
    while pending and len(seen) < _MAX_BETWEEN:
        number = pending.pop()
        if number in seen:
            continue
        seen.add(number)
        node = graph.nodes[number]
        yield node
        is_way = is_linear(node) or node.kind in _MORE_LINEAR or node.kind in _OF_RATIO or node.kind == "DivBackward"
        if is_way and not node.made_by:
            pending += node.behind
