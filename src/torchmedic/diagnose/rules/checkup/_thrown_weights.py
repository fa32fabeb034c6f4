"""A learning rate so high that updates threw the weights far away: what kills a layer is the rate, not the layer."""

from __future__ import annotations

from typing import Any

from torchmedic.diagnose.rule import Draft, Rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.source.lookup.named_numbers import set_and_used
from torchmedic.source.lookup.optimizers import base_of, rate_given_at

_FAR_WEIGHTS = 2.0  # times their size: so far the weights were thrown


def blame_rate(check: Rule[CheckUp], evidence: CheckUp, graph: LossGraph, node: Node, what: str) -> Draft | None:
    """Say that the learning rate is to blame for what happened to a layer; None where the weights have stayed near.

    Args:
        check: The rule that says so.
        evidence: Of the rule.
        graph: Of the last step that was looked at.
        node: The layer.
        what: What happened to the layer.
    """
    distance = evidence.past.distance() if evidence.past is not None else 0.0
    optimizer = _trainer(evidence, graph, node)
    rate = optimizer.param_groups[0].get("lr") if optimizer is not None else None
    if distance < _FAR_WEIGHTS or not isinstance(rate, float | int):
        return None
    cause = rate_given_at(evidence.frames, optimizer, rate, by=evidence.constructions.get(optimizer))
    draft = check.draft(evidence, "likely")
    draft.message = f"the learning rate of {rate:.6g} is too high: {what}"
    draft.cause = f"updates moved the weights by {distance:.3g} times their size, and no gradient passes the layer now"
    written = base_of(optimizer, rate) or rate
    draft.at(*set_and_used(written, cause, f"the value {written:.6g} is written here"))
    draft.at(evidence.of_node("surfaced" if draft.has_place else "cause", node, what))
    draft.help("lower the learning rate to a tenth or less", safety="changes-training")
    return draft.about(step=graph.step)


def _trainer(evidence: CheckUp, graph: LossGraph, node: Node) -> Any:
    """The optimizer that trains the layers before a node."""
    below = {id(tensor) for tensor in graph.leaves_below(node.number)}
    states = evidence.past.optimizers if evidence.past is not None else []
    living = [optimizer for state in states if (optimizer := state.optimizer()) is not None]
    return next((each for each in living if not below.isdisjoint(map(id, parameters_of(each)))), None)
