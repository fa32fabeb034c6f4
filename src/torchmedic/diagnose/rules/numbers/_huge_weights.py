"""Weights that were far too large before any update: the script has made them so, as where it merges models."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from torchmedic.diagnose.words.death import line_location
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.observe.step.tensors import parameters_of
from torchmedic.records import Location, Role
from torchmedic.source.objects.finite import plain
from torchmedic.source.syntax import FUNCTIONS, calls_in, innermost, own_nodes
from torchmedic.source.user_variables import user_trees

_HUGE = 1e4  # root of the mean square of a matrix: no initialisation and no training gives that


class HugeWeights(NamedTuple):
    """The typical size of the matrices, and what has written them."""

    size: float
    places: tuple[Location, ...]


def huge_weights(evidence: NumbersEvidence) -> HugeWeights | None:
    """Weights that are huge although no update that is known has changed them; None where they are not."""
    incident, finite = evidence.incident, evidence.agent.finite
    own = {id(tensor): tensor for tensor in parameters_of(*incident.optimizers) if tensor.dim() > 1 and tensor.numel()}
    copied = {id(tensor) for window in finite.memory.windows() for tensor, _ in window.copy.pairs()}
    if not own or not finite.steps or not copied.isdisjoint(own):
        return None
    parts = [plain(tensor).detach() for tensor in own.values()]
    sizes = [float(part.double().square().mean().sqrt()) for part in parts if part.numel()]
    if not sizes or not all(map(_HUGE.__lt__, sizes)) or not evidence.births or evidence.births[0].op is None:
        return None
    return HugeWeights(median(sizes), tuple(_written_at()))


def _written_at() -> Iterator[Location]:
    """The only line that loads weights, and before it the only one that adds to what is loaded."""
    loads = [(file, tree, call) for file, tree in user_trees() for call in calls_in(tree, "load_state_dict")]
    loads = [(file, tree, call) for file, tree, call in loads if call.args and isinstance(call.args[0], ast.Name)]
    if len(loads) != 1:
        return
    file, tree, call = loads[0]
    state = call.args[0]
    scope = innermost(tree, call.lineno, FUNCTIONS) or tree
    added = [
        node
        for node in own_nodes(scope)
        if isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Add)
        and isinstance(node.target, ast.Subscript)
        and ast.dump(node.target.value) == ast.dump(ast.Name(ast.unparse(state), ast.Load()))
    ]
    if len(added) == 1:
        yield line_location("cause", file, added[0].lineno, "adds weights up")
    role: Role = "origin" if len(added) == 1 else "cause"
    yield line_location(role, file, call.lineno, "the weights are written here, outside of an update")
