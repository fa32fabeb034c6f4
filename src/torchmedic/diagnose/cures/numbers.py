"""Other source for the expression that a bad number came from: what the trials of the rules on numbers are made of."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch

from torchmedic.diagnose.cures.edits import statement_at, whole
from torchmedic.evidence.numbers import NumbersEvidence
from torchmedic.records import Safety, Treatment
from torchmedic.replay.step.trial import node_at
from torchmedic.replay.trace.microscope import Spot

Syntax = TypeVar("Syntax", bound=ast.AST)
P = ParamSpec("P")

_MAX_TRIALS = 6
_MODULES = frozenset("torch F nn functional special linalg math th".split())


class Cure(NamedTuple):
    """One candidate."""

    title: str
    text: str
    spot: Spot
    safety: Safety = "edit"
    same_values: bool = True


def first_that_passes(evidence: NumbersEvidence, cures: Iterable[Cure]) -> Treatment | None:
    """Try one cure after the other on the failing step."""
    for cure in itertools.islice(cures, _MAX_TRIALS):
        tried = evidence.trial(cure.title, cure.text, spot=cure.spot, safety=cure.safety, same_values=cure.same_values)
        if tried is not None:
            return tried
    return None


def first_at_origin(
    evidence: NumbersEvidence,
    cures: Callable[Concatenate[ast.expr, Spot, P], Iterable[Cure]],
    *args: P.args,
    **named: P.kwargs,
) -> Treatment | None:
    """Try the cures for the user's expression at the origin, made by `cures(expression, spot, ...)`."""
    found = expression(evidence)
    return first_that_passes(evidence, cures(*found, *args, **named)) if found is not None else None


# Writing source


def fill(template: str, **parts: ast.expr) -> ast.expr:
    """An expression from a template whose names stand for other expressions: `A / (B + 1e-6)`."""

    class Put(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return copy.deepcopy(parts[node.id]) if node.id in parts else node

    filled: ast.expr = Put().visit(ast.parse(template, mode="eval").body)
    return filled


def written(new: ast.expr, old: ast.expr) -> str:
    """New source that fits where the old expression stands."""
    text = ast.unparse(new)
    closed = isinstance(new, ast.Call | ast.Name | ast.Attribute | ast.Subscript | ast.Constant)
    same = isinstance(new, ast.BinOp) and isinstance(old, ast.BinOp) and type(new.op) is type(old.op)
    return text if closed or same else f"({text})"


def operand_of(node: ast.expr | None, *names: str) -> ast.expr | None:
    """What `torch.log(x)`, `log(x)` and `x.log()` are about, if the call is one of these."""
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    if isinstance(function, ast.Name):
        return node.args[0] if function.id in names and node.args else None
    if not isinstance(function, ast.Attribute) or function.attr.rstrip("_") not in names:
        return None
    is_name = all(isinstance(part, ast.Name | ast.Attribute | ast.Load) for part in ast.walk(function.value))
    if is_name and ast.unparse(function.value).split(".")[0] in _MODULES:
        if node.args:
            return node.args[0]
        return next((word.value for word in node.keywords if word.arg in ("input", "self")), None)
    return function.value


def with_operand(node: Syntax, old: ast.expr, new: ast.expr) -> Syntax:
    """An expression or statement with another operand."""
    position = next((number for number, part in enumerate(ast.walk(node)) if part is old), None)
    duplicate = copy.deepcopy(node)
    marked = next((part for number, part in enumerate(ast.walk(duplicate)) if number == position), None)

    class Put(ast.NodeTransformer):
        def visit(self, part: ast.AST) -> Any:
            return new if part is marked else self.generic_visit(part)

    changed: Syntax = Put().visit(duplicate)
    return changed


def expression(evidence: NumbersEvidence) -> tuple[ast.expr, Spot] | None:
    """The user's expression at the origin."""
    return node_at(evidence.spot) if evidence.spot is not None else None


def smallest_safe(evidence: NumbersEvidence) -> str:
    """A constant that the dtype at the origin can tell from zero, with its square."""
    captured = evidence.replay_with_values(evidence.op)
    dtypes = {tensor.dtype for tensor in captured.tensors} if captured is not None else set()
    return "1e-3" if torch.float16 in dtypes else "1e-6"


# Divisions


def divisor_cures(evidence: NumbersEvidence) -> Iterator[Cure]:
    """Keep the divisor at the origin away from zero."""
    found = expression(evidence)
    eps = smallest_safe(evidence)
    if found is None:
        yield from _augmented(evidence, eps)
        return
    node, spot = found
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mod | ast.FloorDiv):
        parts = {"A": node.left, "B": node.right}
        sign = {ast.Div: "/", ast.Mod: "%", ast.FloorDiv: "//"}[type(node.op)]
        for title, divisor in _away_from_zero(eps, counts=_counts(evidence)):
            yield Cure(title, written(fill(f"A {sign} {divisor}", **parts), node), spot)
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        yield Cure(
            "add a small constant to the base",
            written(fill(f"(A + {eps}) ** B", A=node.left, B=node.right), node),
            spot,
        )
        return
    if isinstance(node, ast.Call):
        argument = _divisor_argument(node)
        if argument is not None:
            for title, text in _away_from_zero(eps, counts=_counts(evidence)):
                yield Cure(title, written(with_operand(node, argument, fill(text, B=argument)), node), spot)
        elif any(word.arg == "eps" for word in node.keywords):
            changed = copy.deepcopy(node)
            for word in changed.keywords:
                if word.arg == "eps":
                    word.value = ast.Constant(float(eps))
            yield Cure("use an eps that is not zero", ast.unparse(changed), spot)


def _away_from_zero(eps: str, counts: bool) -> Iterator[tuple[str, str]]:
    """Titles, and expressions for a divisor `B`."""
    if counts:
        yield "divide by at least one", "(B.clamp(min=1))"
    yield "add a small constant to the divisor", f"(B + {eps})"
    yield "keep the divisor away from zero", f"(B.clamp(min={eps}))"
    yield "leave out divisors that are zero", "torch.where(B == 0, torch.ones_like(B), B)"


def _counts(evidence: NumbersEvidence) -> bool:
    """Whether the divisor counts something: whole numbers from 0 on."""
    captured, op = evidence.replay_with_values(evidence.op), evidence.op
    if captured is None or op is None or len(captured.args) < 2 or not isinstance(captured.args[1], torch.Tensor):
        return False
    divisor = captured.args[1]
    if not divisor.is_floating_point():
        return True
    source = evidence.scope.source(op.inputs[-1]) if evidence.scope is not None else None
    made = evidence.scope.ops[source] if evidence.scope is not None and isinstance(source, int) else None
    return (
        made is not None
        and made.kind in ("sum", "count_nonzero", "to_copy")
        and bool((divisor == divisor.round()).all())
    )


def _divisor_argument(node: ast.Call) -> ast.expr | None:
    found = operand_of(node, "reciprocal", "rsqrt", "pow")
    if found is not None:
        return found
    owner = operand_of(node, "div", "divide", "true_divide", "remainder", "fmod")
    if owner is None:
        return None
    rest = [argument for argument in node.args if argument is not owner]
    named = [word.value for word in node.keywords if word.arg in ("other", "divisor")]
    return next(iter([*rest, *named]), None)


def _augmented(evidence: NumbersEvidence, eps: str) -> Iterator[Cure]:
    """`x /= y`."""
    spot = evidence.spot
    statement = statement_at(spot) if spot is not None else None
    if spot is None or not isinstance(statement, ast.AugAssign) or not isinstance(statement.op, ast.Div):
        return
    for title, divisor in _away_from_zero(eps, counts=_counts(evidence)):
        changed = ast.unparse(fill(divisor, B=statement.value))
        text = f"{ast.unparse(statement.target)} /= {changed}"
        yield Cure(title, text, whole(spot, statement), same_values=False)
