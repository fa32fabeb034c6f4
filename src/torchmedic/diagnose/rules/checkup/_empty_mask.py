"""Masks that select nothing: told apart from a hinge that all values satisfy, and from a reward that is still 0.

A mask comes from a comparison, and nothing that it is computed from is part of the graph of the loss.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from torchmedic.evidence.check_up import spot_of
from torchmedic.observe.checkup.loss_graph import LossGraph, Node
from torchmedic.observe.checkup.node_births import Site
from torchmedic.observe.checkup.selections import SELECTING
from torchmedic.source.lookup.gradient_switches import switch_around
from torchmedic.source.lookup.term_flow import Part, expression_at, names_in, parts_behind
from torchmedic.source.syntax import FUNCTIONS, callee

_COMPARING = frozenset("eq ne gt ge lt le isin isnan isfinite logical_and logical_or logical_not logical_xor".split())


def mask_of(graph: LossGraph, gate: Node) -> Part | None:
    """The expression that makes the mask of a product or a selection; None where it is no such mask."""
    sites = gate.birth.sites if gate.birth is not None else ()
    whole = expression_at(spot_of(sites[0])) if sites else None
    born = {site for node in graph.nodes if node.birth is not None for site in node.birth.sites}
    called = {ast.unparse(call.func) for site in born if (call := _call(site)) is not None}
    inner = {node.birth.sites[0] for node in graph.nodes if node.birth is not None and node.birth.sites}
    for side in _sides(whole) if whole is not None else ():
        flow = list(_flow(side, sites[1:]))
        if any(part.covers(spot_of(site)) for part in flow for site in inner):
            continue  # depends on what is trained
        if any(switch_around(part.file, part.statement.lineno) or called & _texts(part) for part in flow):
            continue  # a model may have a part in it, without gradients
        made = next((part for part in flow if _compares(part.expression)), None)
        if made is not None or gate.kind in SELECTING:
            return made or side
    return None


def _call(site: Site) -> ast.Call | None:
    found = expression_at(spot_of(site))
    return found.expression if found is not None and isinstance(found.expression, ast.Call) else None


def _texts(part: Part) -> set[str]:
    """The names and attributes of an expression."""
    return {ast.unparse(node) for node in ast.walk(part.expression) if isinstance(node, ast.Name | ast.Attribute)}


def _sides(whole: Part) -> Iterator[Part]:
    """The operands among which the mask is."""
    match whole.expression:
        case ast.BinOp(left=left, right=right):
            found = [left, right]
        case ast.Call(func=func, args=args):
            found = [*args, *([func.value] if isinstance(func, ast.Attribute) else [])]
        case ast.Subscript(slice=index):
            found = [index]
        case _:
            found = []
    yield from (whole._replace(expression=each) for each in found)


def _flow(part: Part, callers: Sequence[Site]) -> Iterator[Part]:
    """What an expression was computed from, also in the functions that called its function."""
    flow = parts_behind((part,))
    yield from flow
    given = {name for each in flow for name in names_in(each.expression)}
    call = expression_at(spot_of(callers[0])) if callers and isinstance(part.scope, FUNCTIONS) else None
    if call is not None and isinstance(call.expression, ast.Call) and isinstance(part.scope, FUNCTIONS):
        own = [each.arg for each in part.scope.args.args if each.arg != "self"]
        passed = dict(zip(own, call.expression.args, strict=False))
        passed |= {each.arg: each.value for each in call.expression.keywords if each.arg is not None}
        for name in given & passed.keys():
            yield from _flow(call._replace(expression=passed[name]), callers[1:])


def _compares(node: ast.expr) -> bool:
    """Whether the value of an expression is the result of a comparison, perhaps in another dtype or shape."""
    match node:
        case ast.Compare():
            return True
        case ast.UnaryOp(operand=inner):
            return _compares(inner)
        case ast.BinOp(left=left, right=right, op=ast.BitAnd() | ast.BitOr() | ast.BitXor() | ast.Mult() | ast.Sub()):
            return _compares(left) or _compares(right)
        case ast.Call(func=ast.Attribute(value=inner)):
            return callee(node) in _COMPARING or _compares(inner)
    return isinstance(node, ast.Call) and callee(node) in _COMPARING
