"""The call of a class that built a layer, where a helper function of the user's has made it."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

from torchmedic.records import Location, Role
from torchmedic.source.live_frames import node_location, syntax_tree
from torchmedic.source.syntax import FUNCTIONS, callee, nodes_in
from torchmedic.source.text import relative
from torchmedic.source.user_code import is_user_file


class _Made(NamedTuple):
    file: str
    call: ast.Call
    function: str  # that it stands in


def constructed_at(
    role: Role, kind: type, numbers: tuple[int, ...], built: Location | None, label: str
) -> Location | None:
    """The one call that can have built a layer; None where several can.

    Args:
        role: Of the location.
        kind: The class of the layer.
        numbers: Its first arguments, as far as they are known.
        built: The line that is known to have built it, perhaps through a helper.
        label: Of the location.
    """
    fitting = [each for each in _calls_of(kind.__name__) if _fits(each.call, numbers)]
    here = [each for each in fitting if built is not None and _is_at(each, built)]
    if len(here) == 1:
        return node_location(role, here[0].file, here[0].call, label)
    if built is not None and len(fitting) > 1:
        named = _called_at(built)
        fitting = [each for each in fitting if each.function in named]
    return node_location(role, fitting[0].file, fitting[0].call, label) if len(fitting) == 1 else None


def _is_at(made: _Made, built: Location) -> bool:
    last = made.call.end_lineno or made.call.lineno
    return relative(made.file) == built.file and made.call.lineno <= built.line <= last


def _fits(call: ast.Call, numbers: tuple[int, ...]) -> bool:
    """Whether no plain number among its arguments says otherwise."""
    known = [each.value if isinstance(each, ast.Constant) else None for each in call.args]
    return all(value is None or value == number for value, number in zip(known, numbers, strict=False))


def _called_at(built: Location) -> set[str]:
    """The names of what a line calls."""
    tree = syntax_tree(os.path.abspath(built.file))
    nodes = nodes_in(tree)
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.lineno == built.line]
    return {callee(each) for each in calls}


def _calls_of(name: str) -> Iterator[_Made]:
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    for file in sorted(each for each in files if isinstance(each, str) and is_user_file(each)):
        tree = syntax_tree(file)
        if tree is not None:
            yield from _within(tree, "", name, file)


def _within(tree: ast.AST, function: str, name: str, file: str) -> Iterator[_Made]:
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, FUNCTIONS) else function
        if isinstance(node, ast.Call) and callee(node) == name:
            yield _Made(file, node, inside)
        yield from _within(node, inside, name, file)
