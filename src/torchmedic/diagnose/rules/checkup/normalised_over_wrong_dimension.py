"""Class scores are normalised over the batch or the positions, and the loss takes them as normalised over the classes.

What: `nll_loss` or `cross_entropy` was given the result of a `softmax` or `log_softmax` over another dimension than the
dimension of the classes, which is dimension 1. Or a cross entropy that is written out takes one class of each row of
such a result, or adds up each row. Or attention weights are normalised over the examples of a batch, over the heads, or
over the positions that ask. Or `nll_loss` or `ctc_loss` was given scores that are not normalised at all.

Why: with `dim=0` the probabilities of one class add up to 1 over the batch, so the examples of a batch compete with
each other. The loss does not fall when the right class gets a higher score than the others, and the result depends on
what else is in the batch. Without `dim`, torch guesses 0 for a tensor of three dimensions. No error is raised.

Cure: use `cross_entropy` for scores. Normalise over the classes: `dim=1`, or `dim=-1` for a tensor of shape
(batch, classes).
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.node_births import LossCall
from torchmedic.observe.checkup.normalisations import (
    attention_over_batch,
    attention_over_queries,
    not_normalised,
    read_by_rows,
    wrongly_normalised,
)


@rule("TM644", "normalised-over-wrong-dimension")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        for call, node, classes in wrongly_normalised(graph):
            return _diagnosis(evidence, graph, call, node, classes)
        for reader, node in read_by_rows(graph):
            return _of_rows(evidence, graph, reader, node)
        for node in attention_over_batch(graph):
            return _of_attention(evidence, graph, node)
        for node in attention_over_queries(graph):
            return _of_queries(evidence, graph, node)
        for call, node in not_normalised(graph):
            return _of_scores(evidence, graph, call, node)
    return None


def _of_scores(evidence: CheckUp, graph: LossGraph, call: LossCall, node: Node) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = f"`{call.name}` is given scores that are not normalised, so the loss has no lower bound"
    draft.cause = f"`{call.name}` wants logarithms of probabilities, and was given the result of a layer as it is"
    draft.at(evidence.at("cause", call.sites, "wants the result of `log_softmax`"))
    draft.at(evidence.of_node("origin", node, "makes the scores"))
    draft.because(f"the scores have the shape {list(call.shape)}, and no `log_softmax` lies between layer and loss")
    instead = "give the loss `log_softmax(scores, dim=-1)`"
    if call.name == "nll_loss":
        instead = "use `cross_entropy`, or give the loss `log_softmax(scores, dim=1)`"
    draft.help(instead, safety="changes-training")
    return draft.about(step=graph.step).rated("warning")


def _of_rows(evidence: CheckUp, graph: LossGraph, reader: Node, node: Node) -> Draft:
    shape = node.shape or ()
    name = _name(node)
    draft = check.draft(evidence, "proven")
    draft.message = f"`{name}` normalises over the batch instead of the classes"
    taken = "adds up every row" if reader.kind == "SumBackward" else "takes one class of every row"
    draft.cause = f"`{name}` was taken over dimension 0, and the loss {taken}"
    draft.at(evidence.of_node("cause", node, "adds up to 1 over the batch"))
    draft.at(evidence.of_node("surfaced", reader, taken))
    draft.because(_competing(shape, 0, 1, name))
    draft.help("write `dim=1`, the dimension of the classes", safety="changes-training")
    return draft.about(step=graph.step).rated("warning")


def _name(node: Node) -> str:
    return "softmax" if node.kind == "SoftmaxBackward" else "log_softmax"


def _competing(shape: tuple[int, ...], dim: int, classes: int, name: str) -> str:
    return (
        f"the scores have the shape {list(shape)}: {shape[classes]} classes, and {shape[dim]} values that `{name}` "
        "makes compete with each other"
    )


def _of_attention(evidence: CheckUp, graph: LossGraph, node: Node) -> Draft:
    shape = list(node.shape or ())
    draft = check.draft(evidence, "proven")
    draft.message = "the attention weights are normalised over the batch instead of the positions"
    draft.cause = (
        "`softmax` was taken over dimension 0, and the product with the values adds up over the last dimension"
    )
    draft.at(evidence.of_node("cause", node, "adds up to 1 over the batch"))
    draft.because(f"the scores have the shape {shape}: the {shape[0]} examples of a batch compete with each other")
    draft.help("write `dim=-1`, the dimension of the positions", safety="changes-training")
    return draft.about(step=graph.step).rated("warning")


def _of_queries(evidence: CheckUp, graph: LossGraph, node: Node) -> Draft:
    shape = list(node.shape or ())
    dim = (node.dim or 0) % len(shape)
    over = "the positions that ask" if dim == len(shape) - 2 else "the heads"
    draft = check.draft(evidence, "likely")
    draft.message = f"the attention weights are normalised over {over} instead of the positions that are asked"
    draft.cause = (
        f"`softmax` was taken over dimension {dim}, and the product with the values adds up over the last dimension"
    )
    draft.at(evidence.of_node("cause", node, f"adds up to 1 over dimension {dim}"))
    draft.because(f"the scores have the shape {shape}: the weights of one position do not add up to 1")
    draft.help("write `dim=-1`, the dimension of the positions that are asked", safety="changes-training")
    return draft.about(step=graph.step).rated("warning")


def _diagnosis(evidence: CheckUp, graph: LossGraph, call: LossCall, node: Node, classes: int) -> Draft:
    shape = node.shape or ()
    dim = (node.dim or 0) % len(shape)
    name = _name(node)
    over = "the batch" if dim == 0 else f"dimension {dim}"
    draft = check.draft(evidence, "proven")
    draft.message = f"`{name}` normalises over {over} instead of the classes"
    draft.cause = f"`{call.name}` takes dimension {classes} as the classes, and `{name}` was taken over dimension {dim}"
    draft.at(evidence.of_node("cause", node, f"adds up to 1 over {over}"))
    draft.at(evidence.at("surfaced", call.sites, f"takes the classes in dimension {classes}"))
    draft.because(_competing(shape, dim, classes, name))
    if call.name != "cross_entropy":
        draft.help(f"write `dim={classes}`, the dimension of the classes", safety="changes-training")
    else:
        draft.help(f"give `{call.name}` the scores without `{name}`", safety="changes-training")
    return draft.about(step=graph.step).rated("warning")
