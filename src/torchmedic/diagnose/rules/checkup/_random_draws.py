"""`torch.normal`: a node of the graph whose gradient is 0 by definition."""

from __future__ import annotations

from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.source.syntax import calls_in
from torchmedic.source.user_variables import user_trees


def blocking_draw(evidence: CheckUp, graph: LossGraph) -> tuple[Node, list[str]] | None:
    """A draw that only other layers are given, and the weights it is drawn with, which another term trains.

    A score such as `log_prob` needs the sample itself, and needs no gradient of it. A sample that goes back into the
    layers that it came from is the next step of a sequence.
    """
    if any(True for _, tree in user_trees() for _ in calls_in(tree, "log_prob")):
        return None  # of a sample that was detached, perhaps
    trained = {id(tensor) for tensor in evidence.optimized}
    for node in graph.nodes:
        if node.kind != "NormalBackward" or not graph.complete:
            continue
        behind = {id(leaf): leaf for leaf in graph.leaves_below(node.number) if id(leaf) in trained}
        elsewhere = {id(leaf) for leaf in graph.leaves_reached(without=[node])}
        taking = _weights_of_takers(graph, node)
        if behind and taking and behind.keys() <= elsewhere and taking.isdisjoint(behind):
            return node, [name for leaf in behind.values() if (name := evidence.name_of(leaf))]
    return None


def _weights_of_takers(graph: LossGraph, node: Node) -> set[int]:
    """Identities of the weights of the layers that take a result; none where it comes to the loss without a layer."""
    after: dict[int, list[Node]] = {}
    for other in graph.nodes:
        for number in other.behind:
            after.setdefault(number, []).append(other)
    found: set[int] = set()
    pending, seen = [node.number], {node.number}
    while pending:
        number = pending.pop()
        if number not in after:
            return set()
        for later in after[number]:
            if graph.has_weight(later):
                own = [graph.leaves_below(each) for each in later.behind if node.number not in graph.below(each)]
                found |= {id(leaf) for leaves in own for leaf in leaves}
            elif later.number not in seen:
                seen.add(later.number)
                pending.append(later.number)
    return found
