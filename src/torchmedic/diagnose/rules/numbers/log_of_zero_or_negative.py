"""The logarithm of zero or of a negative number was taken.

What: log(0) is minus infinity and the logarithm of a negative number is NaN; torch raises no error, and the loss
becomes infinite or NaN.

Why: a probability underflowed to exactly 0 (a softmax or sigmoid of a confident model, then log), a count or a mask is
0, or a quantity that should be positive is not.

Cure: compute the logarithm and the function before it in one stable step (`log_softmax`, `logsigmoid`, `logsumexp`), or
keep the argument away from zero with a small constant or a clamp.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from torchmedic.diagnose.cures.numbers import Cure, fill, first_at_origin, operand_of, with_operand, written
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._operands import origin, why_zero
from torchmedic.diagnose.rules.numbers._wording import begin, described, finish, rows, share
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.step.trial import node_at
from torchmedic.replay.trace.microscope import Captured, Op, Spot

_LOGS = ("log", "log2", "log10", "log1p")
# Where the logarithm's own argument stands, and the value at which it becomes minus infinity.
_ARGUMENT = {"log": (0, 0.0), "log2": (0, 0.0), "log10": (0, 0.0), "log1p": (0, -1.0), "xlogy": (1, 0.0)}
_LAYERS = frozenset({"addmm", "linear", "mm", "bmm", "convolution"})  # operations whose results have any sign
_ARGUMENT |= {"special_xlog1py": (1, -1.0), "special_entr": (0, 0.0)}


@rule("TM202", "log-of-zero-or-negative")
def check(evidence: NumbersEvidence) -> Draft | None:
    op, captured = evidence.op, evidence.replay_with_values(evidence.op)
    if op is None or captured is None or op.derived:
        return None
    if op.kind == "linalg_slogdet":
        return _of_determinant(evidence, captured)
    if op.kind not in _ARGUMENT:
        return None
    position, limit = _ARGUMENT[op.kind]
    argument = captured.argument(position)
    if not isinstance(argument, torch.Tensor) or argument.is_complex():
        return None
    below, at = argument < limit, argument == limit
    if not bool((below | at).any()):
        return None
    negative = bool(below.any()) and (evidence.birth is None or evidence.birth.kind == "nan" or not bool(at.any()))
    wrong = below if negative else at
    what = "a negative number" if limit == 0 and negative else "zero" if limit == 0 else "minus one or less"
    lowest = argument[wrong].min().item()
    why = share(wrong, f"the argument of `{op.kind}` is {what}", f"arguments of `{op.kind}` are {what}")
    value = op.inputs[position if len(op.inputs) > position else -1]
    label = f"{op.kind}({lowest:.4g})"
    blamed = value if negative else None
    draft = begin(check, evidence, f"the logarithm of {what}", why, label=label, bad=wrong, operand=blamed)
    draft.at(origin(evidence, value, why_zero(evidence, wrong) if not negative else _why_negative(evidence, wrong)))
    draft.because(f"the argument is {described(argument)}")
    draft.treat(first_at_origin(evidence, _cures, evidence, op, negative))
    return finish(draft, evidence)


def _why_negative(evidence: NumbersEvidence, wrong: torch.Tensor) -> object:
    where = rows(wrong, evidence)

    def why(op: Op, own_line: bool) -> str:
        return f"negative{' in ' + where if where else ''}" if own_line else ""

    return why


def _of_determinant(evidence: NumbersEvidence, captured: Captured) -> Draft | None:
    matrix = captured.argument(0)
    draft = begin(
        check,
        evidence,
        "the logarithm of a determinant that is zero",
        f"the matrix of shape {list(matrix.shape)} is singular, so its determinant is 0",
        label="log(det) of a singular matrix",
        bad=~torch.isfinite(captured.outputs[-1] if captured.outputs[-1].is_floating_point() else captured.outputs[1]),
    )
    draft.because(f"the matrix is {described(matrix)}")
    draft.help("add a small multiple of the identity to the matrix")
    return finish(draft, evidence)


def _cures(node: ast.expr, spot: Spot, evidence: NumbersEvidence, op: Op, negative: bool) -> Iterator[Cure]:
    argument = operand_of(node, *_LOGS)
    if argument is None:
        if operand_of(node, "xlogy") is not None and isinstance(node, ast.Call) and len(node.args) == 2:
            clamped = fill("A.clamp(min=1e-8)", A=node.args[1])
            text = written(with_operand(node, node.args[1], clamped), node)
            yield Cure("keep the argument away from zero", text, spot)
            yield Cure("keep the argument away from zero", text, spot, "changes-training", False)
        return
    if not negative:
        yield from _stable(evidence, op, argument, spot)
    eps = _eps(evidence)
    if op.kind == "log1p":
        limited = fill(f"A.clamp(min=-1 + {eps})", A=argument)
        yield Cure("keep the argument above -1", written(with_operand(node, argument, limited), node), spot)
        return
    if negative:
        yield from _positive_layer(evidence, op, eps)
    else:
        added = fill(f"A + {eps}", A=argument)
        yield Cure("add a small constant to the argument", written(with_operand(node, argument, added), node), spot)
    text = written(with_operand(node, argument, fill(f"A.clamp(min={eps})", A=argument)), node)
    title = "keep the argument positive" if negative else "keep the argument away from zero"
    yield Cure(title, text, spot, "changes-training" if negative else "edit")
    # Arguments that are tiny but not zero change too.
    yield Cure(title, text, spot, "changes-training", False)


def _positive_layer(evidence: NumbersEvidence, op: Op, eps: str) -> Iterator[Cure]:
    """The output of a layer, which may have any sign, made positive where the layer is called."""
    scope = evidence.scope
    source = scope.source(op.inputs[0]) if scope is not None else None
    made = scope.ops[source] if scope is not None and isinstance(source, int) else None
    found = node_at(made.spot) if made is not None and made.spot is not None and made.kind in _LAYERS else None
    if found is not None:
        text = written(fill(f"torch.nn.functional.softplus(A) + {eps}", A=found[0]), found[0])
        yield Cure("make the output of the layer positive", text, found[1], "changes-training", False)


def _eps(evidence: NumbersEvidence) -> str:
    captured = evidence.replay_with_values(evidence.op)
    half = captured is not None and any(tensor.dtype is torch.float16 for tensor in captured.tensors)
    return "1e-6" if half else "1e-8"


def _stable(evidence: NumbersEvidence, op: Op, argument: ast.expr, spot: Spot) -> Iterator[Cure]:
    """The logarithm together with what made its argument."""
    if op.kind != "log":
        return
    inner = argument
    if isinstance(argument, ast.Name | ast.Attribute | ast.Subscript):
        inner = _made_by(evidence, op, spot) or argument
    direct = operand_of(inner, "softmax", "Softmax")
    if direct is not None and isinstance(inner, ast.Call):
        rest = _arguments_of(inner, direct)
        title = "take the logarithm and the softmax in one step"
        yield Cure(title, f"torch.log_softmax({', '.join([ast.unparse(direct), *rest])})", spot)
    squashed = operand_of(inner, "sigmoid")
    if squashed is not None:
        title = "take the logarithm and the sigmoid in one step"
        yield Cure(title, f"torch.nn.functional.logsigmoid({ast.unparse(squashed)})", spot)
    match inner:
        case ast.BinOp(left=ast.Constant(value=1 | 1.0), op=ast.Sub(), right=right):
            squashed = operand_of(right, "sigmoid")
            if squashed is None and isinstance(right, ast.Name):
                squashed = operand_of(_made_by(evidence, op, spot, depth=2), "sigmoid")
            if squashed is not None:
                text = ast.unparse(fill("torch.nn.functional.logsigmoid(-A)", A=squashed))
                yield Cure("take the logarithm and the sigmoid in one step", text, spot)
    summed = operand_of(inner, "sum")
    exponent = operand_of(summed, "exp")
    if summed is not None and exponent is not None and isinstance(inner, ast.Call):
        rest = _arguments_of(inner, summed)
        title = "take the logarithm of the sum in one step"
        if rest:
            yield Cure(title, f"torch.logsumexp({', '.join([ast.unparse(exponent), *rest])})", spot)


def _arguments_of(call: ast.Call, operand: ast.expr) -> list[str]:
    rest = [ast.unparse(part) for part in call.args if part is not operand]
    return rest + [f"{word.arg}={ast.unparse(word.value)}" for word in call.keywords if word.value is not operand]


def _made_by(evidence: NumbersEvidence, op: Op, spot: Spot, depth: int = 1) -> ast.expr | None:
    """The expression that made the argument, if it stands in the same function."""
    scope = evidence.scope
    value = op.inputs[0]
    place: Spot | None = None
    for _ in range(depth):
        source = scope.source(value) if scope is not None else None
        if scope is None or not isinstance(source, int):
            return None
        made = scope.ops[source]
        if made.spot is None or (made.spot.file, made.spot.function) != (spot.file, spot.function):
            return None
        place = made.spot
        value = made.inputs[0] if made.inputs else value
    found = node_at(place) if place is not None else None
    return found[0] if found is not None else None
