"""Statements that a running call of a function does not come to: `if train:` in the one function for both phases.

Only what stays as it is during the call decides: arguments, names that no loop changes, the phase of a loop over names
of phases, attributes of these. What a loop counts may decide otherwise in its next turn.
"""

from __future__ import annotations

import ast
from typing import Any

import torch

from torchmedic.source.bindings import binds, own_statements
from torchmedic.source.live_frames import Frame
from torchmedic.source.lookup.failing_call import UNKNOWN, read
from torchmedic.source.syntax import FUNCTIONS, LEAVING, LOOPS


def not_taken(frame: Frame, body: ast.AST | None) -> frozenset[int]:
    """The identities of statements of a function that its running call passes by."""
    found: set[int] = set()
    if isinstance(body, FUNCTIONS | ast.Module):
        for block in _blocks(body):
            for position, statement in enumerate(block):
                verdict = _decided(statement.test, frame, body) if isinstance(statement, ast.If) else None
                if verdict is None:
                    continue
                assert isinstance(statement, ast.If)
                taken, passed = (statement.body, statement.orelse) if verdict else (statement.orelse, statement.body)
                if taken and isinstance(taken[-1], LEAVING):
                    passed = [*passed, *block[position + 1 :]]
                found |= {id(node) for each in passed for node in ast.walk(each) if isinstance(node, ast.stmt)}
    return frozenset(found)


def _blocks(body: FUNCTIONS | ast.Module) -> list[list[ast.stmt]]:
    holders = [body, *own_statements(body)]
    blocks = [getattr(each, name, None) for each in holders for name in ("body", "orelse", "finalbody")]
    return [block for block in blocks if isinstance(block, list)]


def _decided(test: ast.expr, frame: Frame, body: ast.AST) -> bool | None:
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _decided(operand, frame, body)
            return None if inner is None else not inner
        case ast.BoolOp(op=op, values=values):
            verdicts = [_decided(each, frame, body) for each in values]
            short = isinstance(op, ast.Or)
            return short if short in verdicts else None if None in verdicts else not short
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot() as op], comparators=[right]):
            one, two = _value(left, frame, body), _value(right, frame, body)
            if one is UNKNOWN or two is UNKNOWN:
                return None
            same = one is two if isinstance(op, ast.Is | ast.IsNot) else _equal(one, two)
            return None if same is None else same == isinstance(op, ast.Eq | ast.Is)
        case ast.Name() | ast.Attribute():
            value = _value(test, frame, body)
            if value is None or isinstance(value, bool | int | str):
                return bool(value)
            return True if isinstance(value, torch.optim.Optimizer) else None
    return None


def _equal(one: Any, two: Any) -> bool | None:
    plain = (bool, int, float, str, type(None))
    return one == two if isinstance(one, plain) and isinstance(two, plain) else None


def _value(node: ast.expr, frame: Frame, body: ast.AST) -> Any:
    first = node
    while isinstance(first, ast.Attribute):
        first = first.value
    if isinstance(node, ast.Constant):
        return node.value
    return read(node, frame) if isinstance(first, ast.Name) and _stays(first.id, body) else UNKNOWN


def _stays(name: str, body: ast.AST) -> bool:
    """Whether nothing within the call changes the name, except a loop over the names of phases."""
    made = [statement for statement in own_statements(body) if binds(statement, name)]
    if len(made) == 1 and isinstance(made[0], ast.For):
        over = made[0].iter
        return isinstance(over, ast.List | ast.Tuple) and all(isinstance(each, ast.Constant) for each in over.elts)
    loops = [each for each in own_statements(body) if isinstance(each, LOOPS)]
    return len(made) <= 1 and not any(each is inner for each in made for loop in loops for inner in ast.walk(loop))
