"""A result was too large for float16 or bfloat16, though not for float32.

What: the largest float16 is 65504. A product, a sum, a square or a cast beyond that is infinite, and usually becomes
NaN later.

Why: attention scores that are not scaled, squared or summed activations, large losses, or unnormalised input, under
autocast or in a model that was cast with `.half()`.

Cure: compute that line in float32 (switch autocast off for it and cast its operands), scale the values down first, or
use bfloat16, which has the range of float32.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from torchmedic.diagnose.cures.edits import statement_at, whole
from torchmedic.diagnose.cures.numbers import Cure, fill, first_at_origin, first_that_passes, with_operand
from torchmedic.diagnose.rule import Draft, rule
from torchmedic.diagnose.rules.numbers._courses import is_diverging
from torchmedic.diagnose.rules.numbers._expressions import same_place
from torchmedic.diagnose.rules.numbers._slopes import in_float32
from torchmedic.diagnose.rules.numbers._wording import begin, described, finish, not_finite
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.replay.trace.microscope import Captured, Op, Spot
from torchmedic.replay.trace.values import number
from torchmedic.source.syntax import syntax_tree

_LOW = (torch.float16, torch.bfloat16)


@rule("TM205", "low-precision-overflow")
def check(evidence: NumbersEvidence) -> Draft | None:
    op, captured = evidence.op, evidence.replay_with_values(evidence.op)
    if op is None or captured is None or not captured.outputs or is_diverging(evidence):
        return None
    output = captured.outputs[0]
    bad = not_finite(output)
    if output.dtype not in _LOW or bad is None or not bool(bad.any()):
        return None
    if any(not bool(torch.isfinite(tensor).all()) for tensor in captured.tensors if tensor.is_floating_point()):
        return None
    wide = in_float32(captured)
    if not wide or wide[0].shape != output.shape or not bool(torch.isfinite(wide[0][bad]).all()):
        return None
    peak = wide[0][bad].abs().max().item()
    dtype = str(output.dtype).removeprefix("torch.")
    limit = torch.finfo(output.dtype).max
    name = "the cast" if op.kind == "to_copy" else f"`{op.kind}`"
    side = "the gradient of " if op.derived else ""
    blamed = evidence.forward_op.kind if op.derived and evidence.forward_op is not None else op.kind
    what = f"{side}`{blamed}`" if op.derived else name
    event = f"overflow of {what} in {dtype}"
    why = f"{what} reaches {number(peak)}, and the largest {dtype} is {number(limit)}; in float32 it is finite"
    label = f"{number(peak)} is too large for {dtype}"
    draft = begin(check, evidence, event, why, label=label, bad=bad)
    draft.because(*(f"an operand is {described(tensor)}" for tensor in captured.tensors[:3]))
    casting = _autocast(evidence, op)
    draft.because("autocast chose the type" if casting else "")
    draft.treat(first_at_origin(evidence, _islands, captured, casting))
    draft.treat(first_that_passes(evidence, _wider(evidence)))
    return finish(draft, evidence)


def _autocast(evidence: NumbersEvidence, op: Op) -> bool:
    """Whether autocast cast an operand on the way into the operation."""
    scope = evidence.scope
    if scope is None or op.derived:
        return False
    for value in op.inputs:
        source = scope.source(value)
        if isinstance(source, int) and scope.ops[source].kind == "to_copy" and scope.ops[source].spot == op.spot:
            return True
    return bool(evidence.agent.notes.autocast)


def _islands(node: ast.expr, spot: Spot, captured: Captured, casting: bool) -> Iterator[Cure]:
    """The line in float32."""
    changed = _in_float32(node)
    if changed is None:
        return
    if not casting:
        yield Cure("compute this in float32", f"({ast.unparse(changed)})", spot, same_values=False)
    statement = statement_at(spot)
    if isinstance(statement, ast.Assign | ast.Return | ast.Expr | ast.AugAssign | ast.AnnAssign):
        inner = same_place(node, statement)
        if inner is None:
            return
        line = ast.unparse(with_operand(statement, inner, changed))
        device = captured.outputs[0].device.type
        text = f'with torch.autocast("{device}", enabled=False): {line}'
        yield Cure("compute this line in float32", text, whole(spot, statement), same_values=False)


def _in_float32(node: ast.expr) -> ast.expr | None:
    match node:
        case ast.BinOp(left=left, op=operator, right=right):
            sides = [part if isinstance(part, ast.Constant) else fill("A.float()", A=part) for part in (left, right)]
            return ast.BinOp(sides[0], operator, sides[1])
        case ast.Call(func=ast.Attribute(value=owner, attr=attr)) if ast.unparse(owner).split(".")[0] not in (
            "torch",
            "F",
            "nn",
            "self",
        ):
            return ast.Call(ast.Attribute(fill("A.float()", A=owner), attr, ast.Load()), _floated(node), node.keywords)
        case ast.Call(func=function):
            return ast.Call(function, _floated(node), node.keywords)
    return None


def _floated(node: ast.Call) -> list[ast.expr]:
    plain = (ast.Constant, ast.UnaryOp, ast.Starred, ast.Tuple, ast.List)
    return [part if isinstance(part, plain) else fill("A.float()", A=part) for part in node.args]


def _wider(evidence: NumbersEvidence) -> Iterator[Cure]:
    """bfloat16 where the step's own autocast says float16."""
    step, spot = evidence.step, evidence.spot
    tree = syntax_tree(step.frame.f_code.co_filename) if step is not None else None
    if step is None or tree is None or spot is None:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("autocast"):
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and ast.unparse(part) in ("torch.float16", "torch.half"):
                    place = whole(spot, part)._replace(file=step.frame.f_code.co_filename)
                    yield Cure(
                        "use bfloat16, whose range is that of float32",
                        "torch.bfloat16",
                        place,
                        "changes-training",
                        False,
                    )
