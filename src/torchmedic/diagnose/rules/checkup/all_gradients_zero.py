"""Every gradient is exactly 0, because each path from the loss to the weights contains an operation that blocks it.

What: backward ran and every gradient is 0. Each path back contains an operation that passes no gradient: a clamp whose
bound is active for all values, a ReLU that returns 0 everywhere, a saturated sigmoid or tanh, or `round`, `floor` and
`sign`, whose derivative is 0 almost everywhere. Or two weights that are multiplied with each other are both 0, as both
factors of a low-rank adapter, or all layers of a model whose weights were set to 0. Or a mask selects nothing.

Why: if a clamp holds a value at its bound, a small change of the value has no effect, so its derivative is 0. The
optimizer has no gradient to use, and nothing learns. No error is raised.

Cure: bring the values into the range in which the operation has a derivative: other bounds, a smaller scale, another
initialisation; a smooth function (`softplus` for a clamp or ReLU at 0); a straight-through estimator for `round`.
"""

from __future__ import annotations

import ast

import msgspec
import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.checkup._empty_mask import mask_of
from torchmedic.diagnose.rules.checkup._thrown_weights import blame_rate
from torchmedic.evidence.check_up import CheckUp
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.selections import WEIGHTED
from torchmedic.observe.checkup.zero_weights import ZeroProduct, zero_product
from torchmedic.records import Location, Role
from torchmedic.source.live_frames import node_location
from torchmedic.source.lookup.layers import table_built_at
from torchmedic.source.spots import spot_of_node
from torchmedic.source.syntax import callee, nodes_in
from torchmedic.source.user_variables import user_trees

_CLEARING = ("zeros_", "zero_", "constant_", "fill_")
_MIN_LOOKS_AT_ZEROS = 3  # the first update may well leave one of two factors as it is
_MIN_LOOKS_IN_LOOP = 2  # looks at a line inside of a loop
_KINDS = {
    "ReluBackward": ("ReLU", "gives 0 for every value"),
    "SigmoidBackward": ("sigmoid", "is saturated for every value"),
    "TanhBackward": ("tanh", "is saturated for every value"),
    "HardtanhBackward": ("clamp", "is active for every value"),
    "ClampBackward": ("clamp", "is active for every value"),
    "ClampMinBackward": ("clamp", "is active for every value"),
    "ClampMaxBackward": ("clamp", "is active for every value"),
    "RoundBackward": ("round", "has the derivative 0"),
    "FloorBackward": ("floor", "has the derivative 0"),
    "CeilBackward": ("ceil", "has the derivative 0"),
    "TruncBackward": ("trunc", "has the derivative 0"),
    "SignBackward": ("sign", "has the derivative 0"),
    "NormalBackward": ("random draw", "has the derivative 0"),
    "BernoulliBackward": ("random draw", "has the derivative 0"),
}


_DYING = ("ReluBackward", "SigmoidBackward", "TanhBackward")  # that weights may saturate
_SAME = 1e-5  # of the norm of a matrix
_ROUNDING = ("RoundBackward", "FloorBackward", "CeilBackward", "TruncBackward", "SignBackward")


@rule("TM635", "all-gradients-zero")
def check(evidence: CheckUp) -> Draft | None:
    for graph in evidence.graphs:
        seen = evidence.of_line(graph)
        if evidence.optimized and not evidence.is_enough(len(seen), _MIN_LOOKS_IN_LOOP):
            continue  # one batch may be unlucky
        shut = [shut_gates(other) for other in seen]
        is_zero = not all(root.value for root in seen[-1].roots)
        if all(shut) and (not is_zero or evidence.is_enough(len(seen), _MIN_LOOKS_AT_ZEROS)):
            return _diagnosis(evidence, seen[-1], shut[-1])
        flat = [_behind_flat(evidence, other) for other in seen]
        if flat[-1] is not None and all(flat):
            return _of_flat(evidence, seen[-1], *flat[-1])
        products = [zero_product(other) for other in seen]
        if len(seen) >= _MIN_LOOKS_AT_ZEROS and products[-1] is not None and all(products):
            return _of_zeros(evidence, seen[-1], products[-1])
    return None


def _behind_flat(evidence: CheckUp, graph: LossGraph) -> tuple[Node, torch.Tensor] | None:
    """An operation whose derivative is 0 everywhere, and a trained weight that the loss reaches only through such."""
    flat = [node for node in graph.gates() if node.closed and node.kind in _ROUNDING]
    if not flat or not graph.complete:
        return None
    trained = {id(tensor) for tensor in evidence.optimized}
    reached = {id(tensor) for tensor in graph.leaves_reached(without=flat)}
    for node in flat:
        for tensor in graph.leaves_below(node.number):
            if id(tensor) in trained and id(tensor) not in reached and _is_still(evidence, tensor):
                return node, tensor
    return None


def _is_still(evidence: CheckUp, tensor: torch.Tensor) -> bool:
    """Whether updates have only scaled a matrix since, as weight decay does: no other loss trains it."""
    old = next((value for each, value in evidence.past.pairs() if each is tensor), None) if evidence.past else None
    if old is None or tensor.dim() < 2 or old.device != tensor.device:
        return False
    old, now = old.detach().double(), tensor.detach().double()
    scaled = old * ((now * old).sum() / (old * old).sum().clamp(min=1e-30))
    return bool((now - scaled).norm() <= _SAME * now.norm())


def _of_flat(evidence: CheckUp, graph: LossGraph, node: Node, tensor: torch.Tensor) -> Draft:
    kind, why = _KINDS[node.kind]
    draft = check.draft(evidence, "proven")
    draft.message = f"the gradient of `{evidence.name_of(tensor) or 'a weight'}` is exactly 0, so it never changes"
    draft.cause = f"the loss reaches it only through `{kind}`, which {why}"
    draft.at(evidence.of_node("cause", node, why))
    draft.because(f"seen in {len(evidence.of_line(graph))} steps that were looked at")
    draft.help(f"leave `{kind}` out in training", safety="changes-training")
    return draft.about(step=graph.step)


def _of_zeros(evidence: CheckUp, graph: LossGraph, found: ZeroProduct) -> Draft:
    first, second = (evidence.name_of(tensor) or "a weight" for tensor in found.weights)
    draft = check.draft(evidence, "proven")
    draft.message = f"the gradients of `{first}` and `{second}` are exactly 0, so they never change"
    draft.cause = "both are 0, and the gradient of each is multiplied by the other"
    for tensor in found.weights:
        draft.at(_made(evidence, "origin" if draft.has_place else "cause", tensor))
    draft.at(evidence.of_node("surfaced" if draft.has_place else "cause", found.product, "multiplies the two"))
    draft.because(f"they and their gradients were 0 in {len(evidence.of_line(graph))} steps that were looked at")
    draft.help("begin with random values in one of the two", safety="changes-training")
    return draft.about(step=graph.step)


def _made(evidence: CheckUp, role: Role, tensor: torch.Tensor) -> Location | None:
    """The line that set a weight to 0, as far as it can be told; else the line that made it."""
    layer = next((layer for _, _, layer in evidence.owners(tensor)), None)
    if layer is None:
        return None
    clearing = [
        (file, node)
        for file, tree in user_trees()
        for node in nodes_in(tree)
        if isinstance(node, ast.Call) and callee(node) in _CLEARING and "weight" in ast.unparse(node)
    ]
    if type(layer).__module__.startswith("torch.nn"):
        is_known = len(clearing) == 1
        return node_location(role, *clearing[0], "sets it to 0") if is_known else evidence.built(role, layer, "is 0")
    found = table_built_at(evidence.frames, tensor, None, "is 0")
    return msgspec.structs.replace(found, role=role) if found is not None else None


def shut_gates(graph: LossGraph) -> list[Node]:
    """The gates that explain why all gradients are 0; none where they are not, or not for that reason.

    A hinge that is satisfied by the whole batch is shut as well, and then the loss itself is 0: that is a success. A
    mask that depends on nothing that is trained is none.
    """
    if not graph.is_zero or not graph.complete:
        return []
    shut = [node for node in graph.gates() if node.closed]
    if not shut:
        return []
    if graph.reaches_leaf(without=shut):
        shut += _products(graph, shut)
        if graph.reaches_leaf(without=shut):
            return []
    # Those that the loss comes to first: what lies behind a shut gate does not matter.
    first = [gate for gate in shut if graph.reaches(gate, without=[other for other in shut if other is not gate])]
    gates = {node.number: node for node in shut if node.closed}
    behind = {number for node in first if not node.closed for number in node.behind}
    found = [node for node in first if node.closed] + [gates[number] for number in sorted(behind & gates.keys())]
    is_explained = all(gate.kind in WEIGHTED or mask_of(graph, gate) is not None for gate in found)
    return found if is_explained or all(root.value for root in graph.roots) else []


def _products(graph: LossGraph, shut: list[Node]) -> list[Node]:
    """The products with the result of a gate that gives 0: they let no gradient through to the other factor."""
    numbers = {node.number for node in shut}
    return [node for node in graph.nodes if node.kind == "MulBackward" and not numbers.isdisjoint(node.behind)]


def _of_mask(evidence: CheckUp, graph: LossGraph, gate: Node) -> Draft:
    mask = mask_of(graph, gate) if gate.kind not in WEIGHTED else None
    draft = check.draft(evidence, "proven")
    draft.message = "every gradient is exactly 0: the loss is multiplied by 0 everywhere"
    draft.cause = "the factor is 0 for every value, and there is no other way from the loss to the weights"
    if gate.kind in WEIGHTED:
        draft.message = "every gradient is exactly 0: all weights of the loss are 0"
        draft.cause = "the loss was given a `weight` that is 0 for every value"
    if mask is not None:
        draft.message = "every gradient is exactly 0: the mask of the loss selects nothing"
        draft.cause = "the mask leaves out every value, and there is no other way from the loss to the weights"
        draft.at(spot_of_node(mask.file, mask.expression).location("cause", "selects no value"))
    draft.at(evidence.of_node("surfaced" if mask is not None else "cause", gate, "nothing is left"))
    draft.at(evidence.backward_call(graph, "surfaced", "every gradient is 0"))
    draft.because(f"all gradients were 0 in {len(evidence.of_line(graph))} steps that were looked at")
    if gate.kind in WEIGHTED:
        return draft.help("give the loss weights above 0", safety="changes-training").about(step=graph.step)
    return draft.help("let the mask select the values that the loss is about").about(step=graph.step)


def _diagnosis(evidence: CheckUp, graph: LossGraph, shut: list[Node]) -> Draft:
    gate = max(shut, key=lambda node: node.sequence)
    if gate.kind not in _KINDS:
        return _of_mask(evidence, graph, gate)
    name, why = _KINDS[gate.kind]
    size = 1
    for part in gate.shape or ():
        size *= part
    thrown = blame_rate(check, evidence, graph, gate, f"the {name} {why}") if gate.kind in _DYING else None
    if thrown is not None:
        return thrown.at(evidence.backward_call(graph, "surfaced", "every gradient is 0"))
    draft = check.draft(evidence, "proven")
    draft.message = "every gradient is exactly 0, so nothing can learn"
    draft.cause = f"the {name} {why}, and there is no other way from the loss to the weights"
    active = f"active for {size} of {size} values" if name == "clamp" else why
    draft.at(evidence.of_node("cause", gate, active))
    others = [other for other in shut if other is not gate and other.kind in _KINDS]
    draft.at(*(evidence.of_node("origin", other, _KINDS[other.kind][1]) for other in others))
    draft.at(evidence.backward_call(graph, "surfaced", "every gradient is 0"))
    value = graph.roots[0].value if graph.roots else None
    draft.because(
        f"the loss is {value:.6g}, and not 0" if isinstance(value, float) else "",
        f"all gradients were 0 in {len(evidence.of_line(graph))} steps that were looked at"
        if evidence.optimized
        else "",
    )
    draft.help("bring the values into the range in which the operation has a gradient, or use a smooth function")
    return draft.about(step=graph.step)
