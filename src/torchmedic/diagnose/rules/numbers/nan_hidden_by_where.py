"""A bad value was masked out of the result, but not out of the gradient.

What: `torch.where(x > 0, torch.log(x), 0)` has the right value, because it discards the bad branch. The backward pass
still runs through that branch: it multiplies the zero gradient of the discarded entry by an infinite slope, and 0 * inf
is NaN.

Why: the masking (`where`, multiplication by a mask, indexing, clamping) comes after the operation that is not defined
there.

Cure: make the argument safe before the operation, and keep the mask after it (the "double where").
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from torchmedic.diagnose.cures.numbers import (
    Cure,
    expression,
    fill,
    first_that_passes,
    operand_of,
    with_operand,
    written,
)
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._wording import begin, described, finish
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.step.trial import node_at
from torchmedic.replay.trace.microscope import Captured, Op

_DISCARDING = frozenset(
    "where masked_fill index masked_select gather index_select take nan_to_num clamp clamp_min clamp_max minimum "
    "maximum min max hardtanh slice_scatter".split()
)
_BOUNDING = frozenset("nan_to_num clamp clamp_min clamp_max minimum maximum hardtanh".split())  # keep what is inside
_ADDING_UP = ("sum", "mean")
_MAX_DEPTH = 6  # operations after the bad one


@rule("TM223", "nan-hidden-by-where")
def check(evidence: NumbersEvidence) -> Draft | None:
    birth, op, forward = evidence.birth, evidence.op, evidence.forward_op
    if birth is None or op is None or forward is None or evidence.loss_is_bad or forward.derived:
        return None
    meeting = birth.spoiled or op
    if not meeting.is_backward:
        return None
    values = evidence.replay_with_values(meeting)
    hidden = _zero_gradient(values) if values is not None else None
    if hidden is None:
        return None
    mask = _mask_after(evidence, forward, hidden)
    if mask is None:
        return None
    argument = _argument(evidence, forward)
    event = f"the discarded part of `{forward.kind}`"
    why = f"`{mask.kind}` discards these entries in the forward pass; their gradient is 0 * infinity, which is NaN"
    label = f"the gradient of {forward.kind} is NaN where its result is thrown away"
    draft = begin(check, evidence, event, why, label=label, bad=hidden)
    draft.mark(mask.spot, "surfaced", "discarded here, but the gradient still passes through")
    if argument is not None:
        draft.because(f"the argument of `{forward.kind}` is {described(argument)}")
    places = count(int(hidden.sum().item()), "place")
    draft.because(f"the gradient that arrives at `{forward.kind}` is exactly 0 in {places}")
    draft.treat(first_that_passes(evidence, _cures(evidence, forward, mask)))
    return finish(draft, evidence)


def _argument(evidence: NumbersEvidence, forward: Op) -> torch.Tensor | None:
    values = evidence.replay_with_values(forward)
    return values.tensors[0] if values is not None and values.tensors else None


def _zero_gradient(values: Captured) -> torch.Tensor | None:
    """Where the operation made NaN out of a zero gradient."""
    if not values.outputs or not values.outputs[0].is_floating_point():
        return None
    bad = values.outputs[0].isnan()
    if not bool(bad.any()):
        return None
    for tensor in values.tensors:
        try:
            same = torch.broadcast_to(tensor, bad.shape)
        except RuntimeError:
            continue
        if bool((same[bad] == 0).all()):
            return bad
    return None


def _mask_after(evidence: NumbersEvidence, forward: Op, hidden: torch.Tensor) -> Op | None:
    """The forward operation behind this one that throws the bad entries away; None if another reader keeps them."""
    scope = evidence.scope
    assert scope is not None
    differentiated = {op.forward for op in scope.ops if op.is_backward}
    masks: list[Op] = []
    pending, seen = [(forward, 0)], set()
    while pending:
        here, depth = pending.pop(0)
        for later in scope.readers_of(here):
            if later.is_backward or later.index in seen or later.kind == "detach":
                continue
            seen.add(later.index)
            if _discards(evidence, later, here, hidden):
                masks.append(later)
            elif later.kind in _ADDING_UP and later.index in differentiated:
                return None
            elif depth < _MAX_DEPTH:
                pending.append((later, depth + 1))
    return masks[0] if masks else None


def _discards(evidence: NumbersEvidence, op: Op, masked: Op, hidden: torch.Tensor) -> bool:
    if op.kind in _BOUNDING:
        return not _keeps(evidence, op, masked, hidden)
    return op.kind in _DISCARDING or (op.kind == "mul" and _by_mask(evidence, op, masked, hidden))


def _keeps(evidence: NumbersEvidence, op: Op, masked: Op, hidden: torch.Tensor) -> bool:
    """Whether each of the bad entries is inside of the bounds, so that its gradient passes."""
    values = evidence.replay_with_values(op)
    if values is None or not values.outputs or values.outputs[0].shape != hidden.shape:
        return False
    own = {value.storage for value in masked.outputs}
    given = [tensor for tensor, value in zip(values.tensors, op.inputs, strict=False) if value.storage in own]
    kept = values.outputs[0][hidden]
    return bool(given) and given[0].shape == hidden.shape and bool((given[0][hidden] == kept).all())


def _by_mask(evidence: NumbersEvidence, op: Op, masked: Op, hidden: torch.Tensor) -> bool:
    """Whether a product has a mask of zeros and ones as its other factor, with zeros where the value is hidden."""
    values, scope = evidence.replay_with_values(op), evidence.scope
    if values is None or scope is None:
        return False
    own = {value.storage for value in masked.outputs}
    for tensor, value in zip(values.tensors, op.inputs, strict=False):
        if value.storage in own or not tensor.numel() or not bool((tensor == 0).any()):
            continue
        if tensor.shape == hidden.shape and not bool((tensor[hidden] == 0).any()):
            continue  # it lets these entries pass
        if not tensor.is_floating_point() or bool(((tensor == 0) | (tensor == 1)).all()):
            return True
    return False


def _cures(evidence: NumbersEvidence, forward: Op, mask: Op) -> Iterator[Cure]:
    found = expression(evidence)
    outer = node_at(mask.spot) if mask.spot is not None else None
    if found is None:
        return
    node, spot = found
    argument = _risky_operand(node, forward)
    if argument is None:
        return
    keep = _kept_where(outer[0], node) if outer is not None else None
    safe: list[ast.expr] = []
    if keep is not None:
        safe.append(fill("torch.where(C, A, torch.ones_like(A))", C=keep, A=argument))
    if outer is not None and isinstance(outer[0], ast.Subscript):
        chosen = fill("A[C]", A=argument, C=outer[0].slice)
        if ast.dump(outer[0].value) == ast.dump(node):
            text = written(with_operand(node, argument, chosen), outer[0])
            yield Cure("select before the operation, not after it", text, outer[1], same_values=False)
    for part in safe:
        text = written(with_operand(node, argument, part), node)
        title = "make the argument safe before the operation too (double where)"
        yield Cure(title, text, spot, same_values=False)
    for low in ("A.clamp(min=1e-6)", "A + 1e-6"):
        text = written(with_operand(node, argument, fill(low, A=argument)), node)
        yield Cure("keep the argument where the operation is defined", text, spot, same_values=False)


def _risky_operand(node: ast.expr, forward: Op) -> ast.expr | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.right
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return node.left
    return operand_of(node, forward.kind, forward.kind.replace("a", "arc", 1))


def _kept_where(outer: ast.expr, node: ast.expr) -> ast.expr | None:
    """The condition under which the result is kept, as an expression."""
    match outer:
        case ast.Call(func=ast.Attribute(attr="where"), args=[condition, chosen, _]) if _is_torch(outer):
            kept = ast.dump(node) in ast.dump(chosen) or not _holds(outer.args[2], node)
            return condition if kept else fill("~(C)", C=condition)
        case ast.Call(func=ast.Attribute(attr="where", value=_), args=[condition, _]):
            return condition
        case ast.Call(func=ast.Attribute(attr="masked_fill" | "masked_fill_"), args=[condition, _]):
            return fill("~(C)", C=condition)
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            return fill("C != 0", C=right if _holds(left, node) or not _holds(right, node) else left)
    return None


def _is_torch(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "torch"


def _holds(outer: ast.expr, node: ast.expr) -> bool:
    return ast.dump(node) in ast.dump(outer)
