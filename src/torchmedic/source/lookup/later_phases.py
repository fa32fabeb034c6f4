"""What a script may do differently in later steps: conditions on a counter, and lines that run only under a condition.

What was seen in the first steps is no habit of such a script.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchmedic.source.assignments import flat, sides
from torchmedic.source.syntax import FUNCTIONS, has_line, innermost, nodes_in, own_nodes, syntax_tree
from torchmedic.source.user_variables import user_trees

_COUNTING = frozenset({"range", "trange", "enumerate", "count"})
_OF_FRAMEWORKS = frozenset({"current_epoch", "global_step"})
_SETTLED = ("self.training", "is None", "is not None", "isinstance(")  # tests that say nothing about time


def compares_counter() -> bool:
    """Whether the user's code compares a number that counts steps or epochs, other than to end a loop or to log."""
    trees = [tree for _, tree in user_trees()]
    counters = _OF_FRAMEWORKS.union(*(_counters(tree) for tree in trees))
    return any(_name(side) in counters for tree in trees for test in _tests(tree) for side in sides(test))


def is_conditional(file: str, line: int) -> bool:
    """Whether a line of a function runs only under a condition that may change in the course of a training."""
    tree = syntax_tree(file)
    around = innermost(tree, line, FUNCTIONS) or tree
    return any(
        isinstance(node, ast.If | ast.IfExp)
        and any(has_line(each, line) for each in _branches(node))
        and not any(part in ast.unparse(node.test) for part in _SETTLED)
        for node in (own_nodes(around) if around is not None else ())
    )


def _branches(node: ast.If | ast.IfExp) -> list[ast.stmt] | list[ast.expr]:
    return [node.body, node.orelse] if isinstance(node, ast.IfExp) else [*node.body, *node.orelse]


def _counters(tree: ast.Module) -> Iterator[str]:
    for node in nodes_in(tree):
        match node:
            case ast.For(target=target, iter=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
                if name in _COUNTING:
                    yield from map(_name, list(flat([target]))[:1])
            case ast.AugAssign(target=target, op=ast.Add(), value=ast.Constant()):
                yield _name(target)


def _tests(tree: ast.Module) -> Iterator[ast.Compare]:
    """Comparisons, without those that end a loop, that choose every so many steps or that ask for the first."""
    ends = {id(part) for node in nodes_in(tree) for part in _end_of_loop(node)}
    for node in nodes_in(tree):
        if isinstance(node, ast.Compare) and id(node) not in ends:
            is_first = any(isinstance(side, ast.Constant) and side.value == 0 for side in sides(node))
            if not is_first and not any(isinstance(part, ast.Mod) for part in ast.walk(node)):
                yield node


def _end_of_loop(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.While(test=test) | ast.If(test=test, body=[*_, ast.Break() | ast.Return() | ast.Raise()], orelse=[]):
            yield from ast.walk(test)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
