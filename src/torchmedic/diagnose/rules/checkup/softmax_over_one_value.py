"""A softmax is taken over a dimension of size 1, so its result is constant and every gradient behind it is 0.

What: a layer gives one output, and `softmax`, `log_softmax` or `cross_entropy` normalises over that dimension. The
softmax of a single value is 1, its logarithm is 0, whatever the layer computes.

Why: a model with two classes was given one output, or `dim` names the wrong dimension: attention scores of shape
`(batch, time, 1)` are to be normalised over the time, and `dim=-1` is the dimension of size 1. A constant has no
gradient, so the layer and all layers that feed only this layer never learn. No error is raised.

Cure: for one output, use a sigmoid and `binary_cross_entropy_with_logits`; for classes, give the layer one output per
class; for attention, name the dimension of the positions.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

import msgspec

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.normalisations import softmaxes_of_one
from torchmedic.records import Location
from torchmedic.source.syntax import has_line, nodes_in, syntax_tree

# A view of the same values, which a layer makes of its own result.
_VIEWS = frozenset("ViewBackward UnsafeViewBackward ReshapeAliasBackward".split())
_MIN_STEPS = 3  # that are looked at, where data may have made the dimension
_OUTPUTS = frozenset("out_features out_channels".split())


class Single(NamedTuple):
    """A softmax over one value, and the operation of the layer whose only output that value is."""

    softmax: Node
    maker: Node
    weight: Node


@rule("TM643", "softmax-over-one-value")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        of_one = softmaxes_of_one(graph)
        single = [found for node in of_one if (found := _single(graph, node)) is not None]
        if not of_one or not graph.complete:
            continue
        if not single:
            last = _in_every_step(evidence, graph)
            if last is not None:
                return _diagnosis(evidence, graph, Single(last, last, last), is_all=True)
            continue
        softmaxes = [found.softmax for found in single]
        if not graph.reaches_leaf(without=softmaxes):
            return _diagnosis(evidence, graph, single[0], is_all=True)
        for found in single:
            # One output by a setting (one expert, one head) is a choice that still trains everything else.
            if not graph.reaches(found.weight, without=softmaxes) and _is_written_as_one(_built(evidence, found)):
                return _diagnosis(evidence, graph, found, is_all=False)
    return None


def _in_every_step(evidence: CheckUp, graph: LossGraph) -> Node | None:
    """A softmax over one value that no layer makes, if it lets no gradient through in any of several steps.

    A list of one candidate may well come once.
    """
    seen = evidence.of_line(graph)
    if not evidence.is_enough(len(seen), _MIN_STEPS) or any(
        other.reaches_leaf(without=softmaxes_of_one(other)) for other in seen
    ):
        return None
    last = seen[-1]
    scored = [last.value_of(last.made(call.sequence)) for call in last.losses() if len(call.shape) > 1]
    return next((node for node in softmaxes_of_one(last) if _is_over_features(node) or node in scored), None)


def _is_over_features(softmax: Node) -> bool:
    """Whether a softmax is over the last of several dimensions, which is not the one of a batch or of positions."""
    shape = softmax.shape or ()
    return len(shape) > 1 and softmax.dim is not None and softmax.dim % len(shape) == len(shape) - 1


def _single(graph: LossGraph, softmax: Node) -> Single | None:
    """The layer that makes the dimension one value wide; None where data may have done so: a batch, a sequence of one.

    Between the layer and the softmax there may be operations that keep the shape, and no others.
    """
    if softmax.shape is None or softmax.dim is None or len(softmax.behind) != 1:
        return None
    dim = softmax.dim % len(softmax.shape)
    node = graph.nodes[softmax.behind[0]]
    while node.shape == softmax.shape and node.kind not in _VIEWS:
        if (product := _without_bias(graph, node)) is not None:
            node = product
            continue
        if _weights(graph, node):
            break
        if len(node.behind) != 1 or node.kind in ("TransposeBackward", "PermuteBackward", "TBackward"):
            return None
        node = graph.nodes[node.behind[0]]
    if node.kind in _VIEWS and len(node.behind) == 1 and _is_same_call(node, graph.nodes[node.behind[0]]):
        node = graph.nodes[node.behind[0]]
        if node.shape is None or dim != len(softmax.shape) - 1:
            return None
    elif node.shape != softmax.shape:
        return None
    is_convolution = node.kind == "ConvolutionBackward"
    if not is_convolution and (node.kind not in ("AddmmBackward", "MmBackward") or dim != len(softmax.shape) - 1):
        return None
    for weight, is_turned in _weights(graph, node):
        shape = weight.shape or ()
        if is_convolution and len(shape) == len(softmax.shape) and dim == 1 and shape[0] == 1:
            return Single(softmax, node, weight)
        if not is_convolution and len(shape) == 2 and shape[0 if is_turned else 1] == 1:
            return Single(softmax, node, weight)
    return None


def _without_bias(graph: LossGraph, node: Node) -> Node | None:
    """The product to which a layer adds its bias in an operation of its own."""
    others = [other for number in node.behind if (other := graph.nodes[number]).leaf is None]
    if node.kind != "AddBackward" or len(node.behind) != 2 or len(others) != 1:
        return None
    return others[0] if _is_same_call(node, others[0]) else None


def _weights(graph: LossGraph, node: Node) -> list[tuple[Node, bool]]:
    """The leaves that an operation was given, and whether each was transposed."""
    found: list[tuple[Node, bool]] = []
    for number in node.behind:
        behind = graph.nodes[number]
        is_turned = behind.kind == "TBackward" and len(behind.behind) == 1
        leaf = graph.nodes[behind.behind[0]] if is_turned else behind
        if leaf.leaf is not None:
            found.append((leaf, is_turned))
    return found


def _is_same_call(view: Node, made: Node) -> bool:
    """Whether one call of a layer built both nodes."""
    if view.birth is None or made.birth is None or not made.birth.sites:
        return False
    layers = [birth.layer() if birth.layer is not None else None for birth in (view.birth, made.birth)]
    return view.birth.sites == made.birth.sites and layers[0] is layers[1] is not None


def _built(evidence: CheckUp, found: Single) -> Location | None:
    birth = found.maker.birth
    layer = birth.layer() if birth is not None and birth.layer is not None else None
    return evidence.built("origin", layer, "gives one value") if layer is not None else None


def _is_written_as_one(built: Location | None) -> bool:
    """Whether the line that builds the layer asks for one output by the number 1 itself."""
    if built is None:
        return False
    for node in nodes_in(syntax_tree(built.file)):
        if isinstance(node, ast.Call) and has_line(node, built.line):
            outputs = [*node.args[1:2], *(given.value for given in node.keywords if given.arg in _OUTPUTS)]
            if any(isinstance(given, ast.Constant) and given.value == 1 for given in outputs):
                return True
    return False


def _diagnosis(evidence: CheckUp, graph: LossGraph, found: Single, *, is_all: bool) -> Draft:
    softmax = found.softmax
    call = softmax.birth.loss if softmax.birth is not None else None
    name = call.name if call is not None else "softmax" if softmax.kind == "SoftmaxBackward" else "log_softmax"
    weight = found.weight.leaf() if found.weight.leaf is not None else None
    layer = (evidence.name_of(weight) if weight is not None else "").rpartition(".")[0]
    what = f"the layer `{layer}`" if layer else "the layer before"
    draft = check.draft(evidence, "proven")
    draft.message = (
        "every gradient is exactly 0, so nothing can learn"
        if is_all
        else f"{what} never learns: its gradient is exactly 0"
    )
    draft.cause = f"`{name}` normalises over a dimension of size 1, so its result is always {_constant(softmax)}"
    _places(evidence, graph, found, draft, name)
    draft.because(
        f"`{name}` was given the shape {list(softmax.shape or ())} and normalises over dimension {softmax.dim}, which "
        f"has one value{': the only output of the layer' if found.weight is not softmax else ''}",
        "there is no other way from the loss to the weights" if is_all else "",
    )
    if call is not None:
        draft.help("give the layer one output per class, or use `binary_cross_entropy_with_logits` for one output")
    else:
        draft.help("normalise over the dimension that holds the alternatives, or use a sigmoid for a single score")
    return draft.about(step=graph.step).rated("warning")


def _constant(softmax: Node) -> str:
    return "1" if softmax.kind == "SoftmaxBackward" else "0"


def _places(evidence: CheckUp, graph: LossGraph, found: Single, draft: Draft, name: str) -> None:
    softmax, built = found.softmax, _built(evidence, found)
    birth = softmax.birth
    if birth is not None and birth.loss is not None:
        called = evidence.at("surfaced", birth.sites, f"`{name}` over one class is 0")
        if built is not None:
            draft.at(_as_cause(built, "gives one value, where one per class is needed"), called)
        else:
            draft.at(evidence.at("cause", birth.sites, f"`{name}` over one class is 0"))
        return
    draft.at(evidence.of_node("cause", softmax, f"is {_constant(softmax)} for every input"), built)
    draft.at(evidence.backward_call(graph, "surfaced", "no gradient passes the softmax"))


def _as_cause(built: Location, label: str) -> Location:
    return msgspec.structs.replace(built, role="cause", label=label)
