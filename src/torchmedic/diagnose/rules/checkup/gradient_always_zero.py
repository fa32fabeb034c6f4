"""A trained layer has a gradient of exactly 0 in each step, because an operation behind it is constant.

What: backward ran, and the gradient of a layer was 0 everywhere in several steps. Each path from the loss to the layer
contains an operation whose result does not depend on the layer: a difference or a ratio of two equal tensors, a layer
norm over one value, a clamp whose lower bound is above its upper bound. Or a recurrent layer was given nothing but
zeros as its state in each of several calls.

Why: the same values stand on both sides: the ratio of a policy to the same policy, a positive and a negative example
that are the same example, a mean over one value. Or a hidden state is not passed on from call to call, so each call
begins with zeros and the recurrent weights have no effect. No error is raised.

Cure: compare with values of another source (those of the old policy, another example); put no norm on a single output;
pass the hidden state on.
"""

from __future__ import annotations

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.dead_ends import behind
from torchmedic.observe.checkup.loss_graph import LossGraph, Node

_MIN_CALLS = 2  # of a layer that is given zeros: a single call, as with the first state, may be meant
_MAX_NAMES = 3
_OF_ZEROS = {"zeros", "state"}
_WHY = {
    "equal": "both sides of the {} are equal in every value, so it is constant and its gradients cancel",
    "same": "the {} is given the same values on both sides, so it is 0 and so is each gradient",
    "one value": "a {} over one value gives the same result for every input",
    "dropped": "the {} drops every value: its probability is 1",
    "bounds": "the lower bound of the {} is above its upper bound, so it gives the upper bound for every input",
    "zeros": "the layer is given nothing but zeros in each of its calls, so its weights have no effect",
    "state": "the {} begins with a state of zeros in each of its calls, so its recurrent weights have no effect",
}
_LABELS = {
    "equal": "both sides are equal",
    "same": "both sides are equal",
    "one value": "normalises over one value",
    "dropped": "drops every value",
    "bounds": "the bounds are exchanged",
    "zeros": "is given nothing but zeros",
    "state": "begins with zeros in each call",
}
_HELP = {
    "equal": "take one of the two sides from where it differs: earlier values, another example, another model",
    "same": "compare with a target that is not computed by the same weights from the same input",
    "one value": "leave the norm out where there is a single value",
    "dropped": "give the dropout the share of the values that it drops, not the share that it keeps",
    "bounds": "exchange the two bounds",
    "zeros": "pass the result of one call on to the next call, as the hidden state",
    "state": "pass the state that one call returns on to the next call",
}


_BUILT_SO = ("one value", "dropped")  # the line that builds the layer is to blame


@rule("TM647", "gradient-always-zero")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        if not graph.dead_ends or not graph.complete:
            continue
        reached = _reached(graph)
        of_weights = [(tensor, _node_of(graph, tensor)) for tensor in _candidates(evidence, graph)]
        lost = [tensor for tensor, node in of_weights if node is not None and node.number not in reached]
        ends = [node for node in graph.nodes if node.number in reached and node.sequence in graph.dead_ends]
        ends = [
            node for node in ends if graph.dead_ends[node.sequence].kind not in _OF_ZEROS or _may_be_state(graph, node)
        ]
        for tensor in lost:
            found = [node for node in ends if _leads_to(graph, node, tensor)]
            kinds = {graph.dead_ends[node.sequence].kind for node in found}
            if found and (not kinds <= _OF_ZEROS or len(found) >= _MIN_CALLS):
                return _diagnosis(evidence, graph, max(found, key=lambda node: node.sequence), lost)
        of_data = [node for node in ends if graph.dead_ends[node.sequence].kind == "one value" and 0 in node.missing]
        if of_data:
            return _diagnosis(evidence, graph, of_data[0], [])
    return None


def _candidates(evidence: CheckUp, graph: LossGraph) -> list[torch.Tensor]:
    """The trained matrices; of a step that was run again those whose gradient was 0 in each step before."""
    if graph.unmoved is not None:
        return graph.unmoved
    optimized = {id(tensor) for tensor in evidence.optimized}
    return [tensor for tensor in graph.leaves() if id(tensor) in optimized and tensor.dim() > 1]


def _reached(graph: LossGraph) -> set[int]:
    """The numbers of the nodes to which a gradient can come."""
    seen: set[int] = set()
    pending = [root.node for root in graph.roots if root.node is not None]
    while pending:
        number = pending.pop()
        if number not in seen:
            seen.add(number)
            node = graph.nodes[number]
            pending += behind(node, graph.dead_ends.get(node.sequence))
    return seen


def _node_of(graph: LossGraph, tensor: torch.Tensor) -> Node | None:
    """The node of a weight."""
    return next((node for node in graph.nodes if node.leaf is not None and node.leaf() is tensor), None)


def _leads_to(graph: LossGraph, node: Node, tensor: torch.Tensor) -> bool:
    """Whether a weight would get a gradient from the inputs of an operation that pass none."""
    dead = graph.dead_ends[node.sequence]
    open_ways = behind(node, dead)
    closed = [number for number in node.behind if number not in open_ways]
    if dead.kind in _OF_ZEROS:  # what else lies behind the other factor is not the layer
        return any(graph.value_of(graph.nodes[number]) is _node_of(graph, tensor) for number in closed)
    return any(leaf is tensor for number in closed for leaf in graph.leaves_below(number))


def _may_be_state(graph: LossGraph, product: Node) -> bool:
    """Whether something of the shape of the zeros is computed with a product, which the next call could be given.

    An encoder that is given zeros, as for a part of the input that comes later, computes no such thing.
    """
    on_the_way = {product.number}
    for node in sorted(graph.nodes, key=lambda each: each.sequence):
        if node.sequence > product.sequence and not on_the_way.isdisjoint(node.behind):
            on_the_way.add(node.number)
    return any(graph.nodes[number].shape == graph.dead_ends[product.sequence].shape for number in on_the_way)


def _diagnosis(evidence: CheckUp, graph: LossGraph, end: Node, lost: list[torch.Tensor]) -> Draft:
    dead = graph.dead_ends[end.sequence]
    names = dict.fromkeys(_of_layer(evidence.name_of(tensor)) for tensor in lost)
    shown = [f"`{name}`" for name in names if name]
    more = f" and {len(shown) - _MAX_NAMES} more" if len(shown) > _MAX_NAMES else ""
    draft = check.draft(evidence, "proven")
    what = ", ".join(shown[:_MAX_NAMES]) + more if shown else "some weights"
    of_weights = f"{what} cannot learn: every gradient that comes there is 0"
    draft.message = of_weights if lost else "the data has no effect: this layer gives the same result for every input"
    draft.cause = _WHY[dead.kind].format(dead.name)
    sites = end.birth.sites if end.birth is not None else ()
    built = evidence.of_node("cause", end, _LABELS[dead.kind]) if dead.kind in _BUILT_SO else None
    draft.at(built or evidence.at("cause", sites, _LABELS[dead.kind]))
    draft.at(evidence.backward_call(graph, "surfaced", "no gradient comes to these weights") if lost else None)
    draft.because(
        "there is no other way from the loss to these weights" if lost else "",
        "their gradients were 0 in each of 3 steps, and the step was run again to see why" if graph.unmoved else "",
    )
    draft.help(_HELP[dead.kind])
    return draft.about(step=graph.step).rated("warning")


def _of_layer(name: str) -> str:
    """The name of a layer by that of its weight; a mere number says too little."""
    layer = name.removesuffix(".weight")
    return name if layer.isdigit() else layer
