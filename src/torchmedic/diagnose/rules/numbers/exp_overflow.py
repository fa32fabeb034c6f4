"""An exponential exceeded the largest number of its dtype.

What: in float32 exp(x) is infinite for x above 88.7; the infinity then becomes NaN (inf / inf, inf - inf, 0 * inf),
often in a later line or in the backward pass.

Why: a softmax, softplus, sigmoid or log-sum-exp written out by hand, or the exponential of an unbounded output such as
a log-variance.

Cure: use the built-in function, which subtracts the maximum first (`softmax`, `logsumexp`, `softplus`, `sigmoid`), or
clamp the argument.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from torchmedic.diagnose.cures.numbers import Cure, fill, first_at_origin, operand_of, with_operand, written
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import is_diverging
from torchmedic.diagnose.rules.numbers._expressions import enclosing, only_use
from torchmedic.diagnose.rules.numbers._wording import begin, described, finish, not_finite, share
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trace.microscope import Spot

_EXPONENTIALS = ("exp", "exp2", "expm1", "sinh", "cosh")


@rule("TM204", "exp-overflow")
def check(evidence: NumbersEvidence) -> Draft | None:
    op, captured = evidence.op, evidence.replay_with_values(evidence.op)
    if op is None or captured is None or op.derived or op.kind not in _EXPONENTIALS or is_diverging(evidence):
        return None
    argument = captured.argument(0)
    bad = not_finite(captured.outputs[0])
    if bad is None or not isinstance(argument, torch.Tensor) or not bool(bad.any()):
        return None
    largest = argument[bad].abs().max().item()
    peak = argument[bad].flatten()[argument[bad].abs().argmax()].item()
    limit = torch.finfo(captured.outputs[0].dtype).max
    dtype = str(captured.outputs[0].dtype).removeprefix("torch.")
    why = share(
        bad,
        f"{op.kind}({peak:.4g}) is larger than {limit:.3g}, the largest {dtype}",
        f"results of `{op.kind}` are larger than {limit:.3g}, the largest {dtype}",
    )
    label = f"{op.kind}({peak:.4g}) is infinite"
    draft = begin(check, evidence, f"overflow of `{op.kind}`", why, label=label, bad=bad)
    draft.because(f"the argument is {described(argument)}", f"the largest magnitude that overflows is {largest:.6g}")
    shift = "subtract the largest value of each row first, as `softmax` and `logsumexp` do; or limit the argument"
    draft.treat(first_at_origin(evidence, _cures), otherwise=shift)
    return finish(draft, evidence)


def _cures(node: ast.expr, spot: Spot) -> Iterator[Cure]:
    argument = operand_of(node, *_EXPONENTIALS)
    if argument is None:
        return
    yield from _built_in(node, argument, spot)
    for most in ("80", "20"):
        clamped = fill(f"A.clamp(max={most})", A=argument)
        text = written(with_operand(node, argument, clamped), node)
        yield Cure("limit the argument", text, spot, "changes-training")


def _built_in(node: ast.expr, argument: ast.expr, spot: Spot) -> Iterator[Cure]:
    """The function that was written out by hand around this exponential, as torch has it."""
    for outer, place in enclosing(node, spot):
        match outer:
            case ast.BinOp(op=ast.Div(), left=left, right=right) if ast.dump(left) == ast.dump(node):
                summed = operand_of(right, "sum")
                if summed is not None and isinstance(right, ast.Call) and ast.dump(summed) == ast.dump(node):
                    dim = _dim_of(right, summed)
                    text = ast.unparse(fill(f"torch.softmax(A, {dim})", A=argument))
                    yield Cure("use the built-in softmax, which cannot overflow", text, place)
            case ast.BinOp(op=ast.Div(), left=ast.Constant(value=1 | 1.0), right=right) if _one_plus(right, node):
                inner = argument.operand if isinstance(argument, ast.UnaryOp) else fill("-A", A=argument)
                text = ast.unparse(fill("torch.sigmoid(A)", A=inner))
                yield Cure("use the built-in sigmoid, which cannot overflow", text, place)
            case ast.Call():
                logged = operand_of(outer, "log")
                plain = operand_of(outer, "log1p")
                if (logged is not None and _one_plus(logged, node)) or (
                    plain is not None and ast.dump(plain) == ast.dump(node)
                ):
                    text = ast.unparse(fill("torch.nn.functional.softplus(A)", A=argument))
                    yield Cure("use the built-in softplus, which cannot overflow", text, place)
                summed = operand_of(logged, "sum")
                if isinstance(logged, ast.Call) and summed is not None and ast.dump(summed) == ast.dump(node):
                    text = ast.unparse(fill(f"torch.logsumexp(A, {_dim_of(logged, summed)})", A=argument))
                    yield Cure("use logsumexp, which cannot overflow", text, place)
    use = only_use(node, spot)
    if use is not None:
        name, outer = use
        match outer:
            case ast.BinOp(op=ast.Div(), left=ast.Name(id=above), right=ast.Call() as right) if above == name:
                summed = operand_of(right, "sum")
                if isinstance(summed, ast.Name) and summed.id == name:
                    shifted = fill(f"A - A.amax({_dim_of(right, summed)}, keepdim=True)", A=argument)
                    text = written(with_operand(node, argument, shifted), node)
                    yield Cure("subtract the maximum first", text, spot, same_values=False)


def _one_plus(node: ast.expr, exponential: ast.expr) -> bool:
    match node:
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            sides = (left, right)
            has_one = any(isinstance(side, ast.Constant) and side.value == 1 for side in sides)
            return has_one and any(ast.dump(side) == ast.dump(exponential) for side in sides)
    return False


def _dim_of(call: ast.Call, operand: ast.expr) -> str:
    rest = [part for part in call.args if part is not operand]
    named = [word.value for word in call.keywords if word.arg in ("dim", "axis")]
    return ast.unparse([*named, *rest][0]) if named or rest else "tuple(range(A.dim()))"
