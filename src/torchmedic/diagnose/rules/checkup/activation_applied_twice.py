"""The model ends in a softmax or sigmoid, and the loss applies it again, or takes the logarithm of it.

What: `cross_entropy` was given the result of a softmax, or `binary_cross_entropy_with_logits` the result of a sigmoid.
Or `nll_loss` or `kl_div` was given the result of a softmax, or a distribution was given it as `logits`.

Why: the first two losses take *scores* and apply the activation themselves. Probabilities are between 0 and 1, and the
second activation flattens them: with ten classes the highest possible probability is 0.23. The loss cannot approach 0,
gradients are small, and training is slow or makes no progress, without any error. `nll_loss` and `kl_div` take
*logarithms* of probabilities. Given probabilities they are no likelihood and no divergence, and may be below 0.

Cure: let the model return scores, without the activation. Apply the activation only where probabilities are needed,
when predicting. For `nll_loss` and `kl_div`, use `log_softmax` instead of the softmax.
"""

from __future__ import annotations

import ast
import math

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp, spot_of
from torchmedic.observe.checkup.graph_facts import activation_of
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.node_births import LossCall
from torchmedic.observe.checkup.policy_terms import probabilities_as_logits
from torchmedic.records import Location
from torchmedic.source.lookup.term_flow import expression_at
from torchmedic.source.syntax import callee

_OF_LOGARITHMS = ("nll_loss", "kl_div")
_NAMES = {"SoftmaxBackward": "softmax", "SigmoidBackward": "sigmoid"}


@rule("TM633", "activation-applied-twice")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        for call in graph.losses():
            node = activation_of(graph, call)
            if node is not None and _is_doubled(call, node):
                return _diagnosis(evidence, graph, call, node)
        for softmax, normalised in probabilities_as_logits(graph):
            return _as_logits(evidence, graph, softmax, normalised)
    return None


def _is_doubled(call: LossCall, node: Node) -> bool:
    if call.name == "binary_cross_entropy_with_logits":
        return bool(node.kind == "SigmoidBackward")
    if (
        call.name not in ("cross_entropy", *_OF_LOGARITHMS)
        or node.kind != "SoftmaxBackward"
        or node.shape is None
        or node.dim is None
    ):
        return False
    if len(call.shape) < 2:
        return False
    # Over the classes, not over something else such as the positions of an attention.
    classes = call.shape[1]
    dim = node.dim % len(node.shape)
    if node.shape == call.shape:
        return dim == 1
    return dim == len(node.shape) - 1 and node.shape[dim] == classes and classes > 1


def _as_logits(evidence: CheckUp, graph: LossGraph, softmax: Node, normalised: Node) -> Draft:
    draft = check.draft(evidence, "proven")
    draft.message = "a distribution is given probabilities as `logits`, and applies a softmax to them a second time"
    draft.cause = "the model returns the result of a softmax where `logits` takes scores"
    draft.at(evidence.of_node("origin", softmax, "gives probabilities"))
    draft.at(evidence.of_node("cause", normalised, "takes them for scores"))
    draft.because("probabilities differ by 1 at most, so no outcome is ever much more likely than another")
    draft.help("pass them as `probs`, or take the softmax out of the model", safety="changes-training")
    return draft.about(step=graph.step).rated("warning")


def _diagnosis(evidence: CheckUp, graph: LossGraph, call: LossCall, node: Node) -> Draft:
    name = _NAMES[node.kind]
    draft = check.draft(evidence, "proven")
    if call.name in _OF_LOGARITHMS:
        draft.message = f"`{call.name}` is given probabilities, and takes their logarithms"
        draft.cause = f"a softmax gives probabilities where `{call.name}` takes the result of `log_softmax`"
        draft.at(*evidence.of_end(graph, node, "gives probabilities, not their logarithms"))
        draft.at(evidence.at("surfaced", call.sites, "takes logarithms of probabilities"))
        draft.because("without the logarithm, a wrong class costs next to nothing, however sure the model is of it")
        draft.help("use `log_softmax` instead of the softmax", safety="changes-training")
        return draft.about(step=graph.step).rated("warning")
    draft.message = f"`{call.name}` is given the result of a {name}, and applies it a second time"
    draft.cause = f"the model returns probabilities where `{call.name}` takes scores"
    label = f"gives probabilities: the loss applies its own {name}"
    ends = evidence.of_end(graph, node, label)
    called = _called(evidence, node, label) if len(ends) < 2 else None
    draft.at(*([called] if called is not None else ends))
    draft.at(evidence.at("surfaced", call.sites, "takes scores"))
    if name == "softmax":
        classes = call.shape[1]
        best = math.e / (math.e + classes - 1)
        draft.because(
            f"with {classes} classes the loss cannot fall below {-math.log(best):.4f}, "
            f"as if every prediction were {best:.2f} sure at most"
        )
    else:
        draft.because("the second sigmoid gives values from 0.50 to 0.73, so the loss cannot come near 0")
    draft.help(f"take the {name} out of the model, and apply it only where probabilities are shown")
    return draft.about(step=graph.step).rated("warning")


def _called(evidence: CheckUp, node: Node, label: str) -> Location | None:
    """The call of an activation that a line of the user's calls by its name, and not through a container."""
    birth = node.birth
    layer = birth.layer() if birth is not None and birth.layer is not None else None
    found = expression_at(spot_of(birth.sites[0])) if layer is not None and birth is not None and birth.sites else None
    if birth is None or found is None or not isinstance(found.expression, ast.Call):
        return None
    name = callee(found.expression)
    names = [
        path.rpartition(".")[2] for model in evidence.models for path, each in model.named_modules() if each is layer
    ]
    return evidence.at("cause", birth.sites, label) if name in names else None
