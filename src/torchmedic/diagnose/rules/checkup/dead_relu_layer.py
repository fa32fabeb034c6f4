"""An activation has no derivative left in several steps, so the layers before it do not learn.

What: in each of the checked steps, a ReLU returned 0 for every unit and every sample of the batch, or a sigmoid or a
tanh was saturated.

Why: where a ReLU returns 0, its derivative is 0. If none of its inputs is positive, no gradient reaches the layers
before it, so their weights do not change, and the inputs stay as they are. Common causes are a large negative bias,
inputs that are not normalised, a learning rate that was far too high in one step, or a ReLU after an operation that
never returns a positive value.

The same happens to a sigmoid or a tanh whose inputs are far too large: nearly all of its values are exactly 0, 1 or -1,
and their derivatives are 0.

Cure: check the initialisation and the scale of the inputs; put a normalisation before the ReLU; or use a function with
a gradient for negative inputs, such as `leaky_relu` or `gelu`.
"""

from __future__ import annotations

import math

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.checkup._thrown_weights import blame_rate
from torchmedic.diagnose.rules.checkup.all_gradients_zero import shut_gates
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.node_births import Site

_MIN_STEPS = 3
_MIN_UNITS = 4  # a single gate may well be shut


_KINDS = {
    "ReluBackward": ("ReLU", "it gives 0 for every unit and every sample", "none of its inputs is positive"),
    "SigmoidBackward": ("sigmoid", "99 % of its values or more are exactly 0 or 1", "its inputs are too large"),
    "TanhBackward": ("tanh", "99 % of its values or more are exactly -1 or 1", "its inputs are too large"),
}


@rule("TM636", "dead-relu-layer")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        seen = evidence.of_line(graph)
        if not evidence.is_enough(len(seen), _MIN_STEPS) or any(shut_gates(other) for other in seen):
            continue
        common = set.intersection(*(set(_dead(other)) for other in seen))
        for place, node in _dead(seen[-1]).items():
            if place in common:
                return _diagnosis(evidence, seen, node)
    return None


def _dead(graph: LossGraph) -> dict[tuple[int | None, tuple[Site, ...]], Node]:
    """The activations without a derivative for any value, by where they are; not a hinge, which is the loss itself."""
    found: dict[tuple[int | None, tuple[Site, ...]], Node] = {}
    open_at = set()
    for node in graph.gates():
        if node.kind not in _KINDS or node.birth is None:
            continue
        layer = node.birth.layer() if node.birth.layer is not None else None
        place = (id(layer) if layer is not None else None, node.birth.sites)
        if node.closed and math.prod((node.shape or ())[1:]) >= _MIN_UNITS and graph.is_followed_by_weights(node):
            found[place] = node
        else:
            open_at.add(place)  # the same line may run several times
    return {place: node for place, node in found.items() if place not in open_at}


def _diagnosis(evidence: CheckUp, seen: list[LossGraph], node: Node) -> Draft:
    shape = list(node.shape or ())
    name, gives, why = _KINDS[node.kind]
    is_relu = node.kind == "ReluBackward"
    steps = ", ".join(str(graph.step) for graph in seen)
    what = f"a {name} layer is {'dead' if is_relu else 'saturated'}"
    so = f"seen in each of the steps that were looked at: {steps}"
    thrown = blame_rate(check, evidence, seen[-1], node, what)
    if thrown is not None:
        return thrown.because(so).rated("warning")
    draft = check.draft(evidence, "proven").because(so)
    draft.message = f"{what}: {gives}"
    draft.cause = f"{why}, so {'no' if is_relu else 'next to no'} gradient passes and the layers before it do not learn"
    label = f"all values of {shape} are 0" if is_relu else f"values of {shape} at their limits"
    draft.at(evidence.of_node("cause", node, label))
    draft.help(
        "check the bias and the scale of the layer before it, or use `leaky_relu` or `gelu`"
        if is_relu
        else "scale the data, and check the scale of the layer before it"
    )
    return draft.about(step=seen[-1].step).rated("warning")
