"""The target of the loss is the model's own output times a factor above 1, so it grows from update to update.

What: the step was run again under the microscope. The loss compares the output of the model with a target that no
gradient reaches, and nearly all of this target is an output of the model, or of a copy of it, times a factor above 1.
Or the target comes from a copy of the model, as a teacher or a target network, and the update of this copy is no mean
of its old weights and the trained ones: a decay above 1, or factors that do not add up to 1.

Why: the model learns to give the target, the next target is the factor times as large, and so on without an end. A
discount of 1.01 in a value function does this at any learning rate.

Cure: use a factor below 1, factors of an average that add up to 1, or leave out what follows the end of an episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import finish, locate_factor
from torchmedic.diagnose.rules.numbers._growing_copies import explains, growing_copy
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trace.microscope import Leaf, Microscope, Op, Value
from torchmedic.replay.trace.values import number

_MIN_FACTOR = 1.0005
_MAX_FACTOR = 3.0
_MAX_SHARE = 1.2  # times the multiplied output: the target has hardly another part
_MAX_NODES = 20_000
# What hands a multiplied output on to the loss, so that its size stays that of the output.
_LINEAR = frozenset(
    "add sub rsub mul neg stack cat view reshape squeeze unsqueeze expand select slice index gather detach clone "
    "to_copy copy alias transpose t flatten unbind lift_fresh".split()
)


@rule("TM240", "self-amplifying-target")
def check(evidence: NumbersEvidence) -> Draft | None:
    if evidence.scope is None and not evidence.replay_once():
        return None
    scope, played = evidence.scope, evidence.played
    roots = [root for root in played.roots if root.numel() == 1] if played is not None else []
    if scope is None or not roots:
        return None
    found = _amplifier(scope, roots[-1])
    if found is None or found[0].spot is None:
        return _by_copy(evidence)
    op, factor = found
    draft = check.draft(evidence, "proven")
    draft.message = f"the targets of the loss are the model's own outputs times {factor:.4g}: they grow without bound"
    draft.cause = f"an output that is learned from targets {factor:.4g} times its size makes the next targets larger"
    if op.spot is not None:
        locate_factor(draft, op.spot, f"outputs of the model times {factor:.4g}", factor)
    draft.help("use a factor (discount) below 1", safety="changes-training")
    return finish(draft, evidence)


def _by_copy(evidence: NumbersEvidence) -> Draft | None:
    """The targets come from a copy of the model whose own update makes it larger."""
    copy = growing_copy(evidence)
    if copy is None or copy.op.spot is None:
        return None
    draft = check.draft(evidence, "proven" if explains(copy) else "likely")
    draft.message = (
        f"the copy of the model that gives the targets grows without bound: its weights reach {copy.now:.3g}"
    )
    draft.cause = "an update of the copy is no mean of old and new weights: it leaves the range between both"
    is_multiplied = copy.factor > _MIN_FACTOR
    label = f"the weights of the copy, times {copy.factor:.4g}" if is_multiplied else "the copy is updated here"
    locate_factor(draft, copy.op.spot, label, copy.factor if is_multiplied else 0.0)
    draft.because(f"the largest weight of the trained model was {number(copy.before)}")
    loss, other = number(copy.loss), number(copy.other_loss)
    draft.because(f"the loss is {loss}; with the trained weights in place of the copy it is {other}")
    draft.help("make the factors of old and new weights add up to 1: decay and 1 - decay", safety="changes-training")
    return finish(draft, evidence)


def _amplifier(scope: Microscope, loss: torch.Tensor) -> tuple[Op, float] | None:
    """The product of an output of the model and a factor above 1 that is the target of a loss."""
    differentiated = set(_graph_ops(loss, scope))
    behind = _behind(scope, [scope.value_of(loss)])
    constant = {index for index in behind if index not in differentiated and not scope.ops[index].derived}
    for index in sorted(constant):
        op = scope.ops[index]
        if op.kind != "mul" or not op.outputs:
            continue
        own = [value for value in op.inputs if _is_of_model(scope, value)]
        size = scope.magnitude(own[0]) if len(own) == 1 else 0.0
        factor = scope.magnitude(op.outputs[0]) / size if size > 0 else 0.0
        if _MIN_FACTOR < factor < _MAX_FACTOR and _is_target(scope, op, constant, behind):
            return op, factor
    return None


def _is_target(scope: Microscope, op: Op, constant: set[int], behind: set[int]) -> bool:
    """Whether a value goes into a loss nearly as it is."""
    largest = _MAX_SHARE * scope.magnitude(op.outputs[0])
    following, seen = [op], {op.index}
    arrives = False
    while following:
        for reader in scope.readers_of(following.pop()):
            if reader.index in seen or reader.index not in behind:
                continue
            seen.add(reader.index)
            if reader.index not in constant:
                arrives = True
            elif reader.kind not in _LINEAR or not scope.magnitude(reader.outputs[0]) <= largest:
                return False
            else:
                following.append(reader)
    return arrives


def _is_of_model(scope: Microscope, value: Value) -> bool:
    """Whether a value was computed with parameters."""
    leaves = (
        source
        for index in _behind(scope, [value])
        for each in scope.ops[index].inputs
        if (source := scope.source(each))
    )
    return any(isinstance(leaf, Leaf) and isinstance(leaf.tensor, torch.nn.Parameter) for leaf in leaves)


def _behind(scope: Microscope, values: list[Value]) -> set[int]:
    """The operations that values were computed by."""
    found: set[int] = set()
    stack = list(values)
    while stack and len(found) < _MAX_NODES:
        source = scope.source(stack.pop())
        if isinstance(source, int) and source not in found:
            found.add(source)
            stack += scope.ops[source].inputs
    return found


def _graph_ops(loss: torch.Tensor, scope: Microscope) -> Iterator[int]:
    """The operations that a gradient of a loss goes through."""
    stack: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while stack and len(seen) < _MAX_NODES:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        op = scope.op_of(node) if hasattr(node, "_sequence_nr") else None
        if op is not None:
            yield op.index
        stack += [following for following, _ in getattr(node, "next_functions", ())]
