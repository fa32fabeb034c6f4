"""The first loss is much higher than the loss of a model that gives all classes the same probability.

What: cross entropy over C classes is log C if all classes are equally likely, for all labels. An untrained model should
have about this loss. A much higher loss means that the model is very confident without a reason, and the first hundreds
of steps are needed to undo that.

Why: the data is not scaled, such as pixels from 0 to 255.

Cure: scale the data to about -1 to 1, or subtract the mean and divide by the standard deviation.
"""

from __future__ import annotations

import msgspec

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.evidence.data_makers import largest_made_at
from torchmedic.observe.checkup.graph_facts import is_too_high
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.node_births import Site

_MIN_UNSCALED_VALUE = 50.0  # of data that was not scaled


@rule("TM639", "first-loss-too-high")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        first = _fed_with_large_data(graph) if is_too_high(graph) else None
        if first is not None:
            return _diagnosis(evidence, graph, first)
    return None


def _diagnosis(evidence: CheckUp, graph: LossGraph, first: Node) -> Draft:
    loss = graph.nodes[graph.roots[0].node or 0]
    value, expected = graph.roots[0].value, graph.untrained
    draft = check.draft(evidence, "proven")
    draft.message = f"the first loss is {value:.4g}, where equal chances for all classes give {expected:.4g}"
    draft.cause = "the untrained model gives very confident predictions"
    label = f"the first layer is given values up to {first.largest:.4g}"
    given = evidence.at("cause", _called(first, loss), label)
    call = evidence.first_call
    made = (
        largest_made_at(evidence.frames, call, first.largest, "this data is not scaled") if call is not None else None
    )
    if made is not None and given is not None and made.line != given.line:
        draft.at(made, msgspec.structs.replace(given, role="origin"))
    else:
        draft.at(given)
    draft.at(evidence.of_node("surfaced", loss, "this loss"))
    draft.because(f"{label}, in step 0")
    draft.help("scale the data to about -1 to 1", safety="changes-training")
    return draft.about(step=graph.step).rated("warning")


def _called(first: Node, loss: Node) -> tuple[Site, ...]:
    """Where the loop calls the model: in the function that calls the loss too, or else where the layer is called."""
    sites = first.birth.sites if first.birth is not None else ()
    loops = {site.code for site in loss.birth.sites} if loss.birth is not None else set()
    return tuple(site for site in sites if site.code in loops)[:1] or sites[:1]


def _fed_with_large_data(graph: LossGraph) -> Node | None:
    """The first layer, if it was given data that is not scaled."""
    fed = [node for node in graph.nodes if isinstance(node.largest, float)]
    first = min(fed, key=lambda node: node.sequence, default=None)
    if first is None or first.birth is None or not first.birth.sites:
        return None
    return first if _MIN_UNSCALED_VALUE <= first.largest < float("inf") else None
