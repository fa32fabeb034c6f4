"""The model ends in an activation whose range does not include the targets.

What: the output of a ReLU, sigmoid, tanh or softmax was passed to a regression loss, and many targets are outside the
range of that activation; or a ReLU removed all negative scores before `binary_cross_entropy_with_logits`, so no
probability below one half can be predicted. Or targets of a binary cross entropy are outside of 0 to 1.

Why: the output of a ReLU is never below 0, the output of a sigmoid is between 0 and 1. If the target is outside this
range, training pushes the output to the end of the range, the gradient there is 0 or vanishes, and the error remains.
A binary cross entropy with a target above 1, as in a mask of 0 and 255, falls without an end.

Targets that a mask may leave out of the loss, such as -1 for a missing value, are not judged.

Cure: end the model with the linear layer. Or scale the targets to the range of the activation.
"""

from __future__ import annotations

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.graph_facts import may_leave_out_targets
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.node_births import LossCall
from torchmedic.observe.checkup.targets import BINARY

_MIN_SHARE_OF_TARGETS = 0.1  # of the targets: a few that lie outside may be noise
_ENDS = {
    "ReluBackward": ("ReLU", "nothing below 0"),
    "SigmoidBackward": ("sigmoid", "nothing outside of 0 to 1"),
    "SoftmaxBackward": ("softmax", "nothing outside of 0 to 1"),
    "TanhBackward": ("tanh", "nothing outside of -1 to 1"),
}


@rule("TM634", "target-out-of-reach")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        for call in graph.losses():
            node = graph.value_of(graph.made(call.sequence))
            count, size = graph.outside.get(id(call), (0, 1))
            if not count or may_leave_out_targets(graph, call):
                continue
            if call.name in BINARY and not (node is not None and node.kind == "ReluBackward"):
                return _not_binary(evidence, graph, call)
            if node is not None and node.kind in _ENDS and count > _MIN_SHARE_OF_TARGETS * size:
                return _diagnosis(evidence, graph, call, node)
    return None


def _not_binary(evidence: CheckUp, graph: LossGraph, call: LossCall) -> Draft:
    count, size = graph.outside[id(call)]
    target = call.target()
    reach = "" if target is None else f" from {float(target.min()):.4g} to {float(target.max()):.4g}"
    draft = check.draft(evidence, "proven")
    draft.message = f"{count} of {size} targets of `{call.name}` are outside of 0 to 1, so the loss has no lower bound"
    draft.cause = f"targets are probabilities, and these go{reach or ' further'}"
    draft.at(evidence.at("cause", call.sites, f"targets{reach}"))
    draft.because(f"counted in the batch of step {graph.step}")
    draft.help("scale the targets to 0 and 1 (a mask of 0 and 255: divide by 255)")
    return draft.about(step=graph.step).rated("warning")


def _diagnosis(evidence: CheckUp, graph: LossGraph, call: LossCall, node: Node) -> Draft:
    count, size = graph.outside[id(call)]
    name, limit = _ENDS[node.kind]
    scores = call.name == "binary_cross_entropy_with_logits"
    what = "no probability below 0.5" if scores else limit
    draft = check.draft(evidence, "proven")
    draft.message = f"{count} of {size} targets of `{call.name}` cannot be reached: the model ends in a {name}"
    draft.cause = f"the {name} gives {limit}" + (", so every probability is 0.5 or more" if scores else "")
    draft.at(*evidence.of_end(graph, node, f"gives {what}"))
    draft.at(evidence.at("surfaced", call.sites, f"{count} of {size} targets lie beyond"))
    draft.because(f"counted in the batch of step {graph.step}")
    draft.help(f"remove the {name} at the end of the model" + ("" if scores else ", or scale the targets"))
    return draft.about(step=graph.step).rated("warning")
