"""Whether a line that makes a holder anew runs again and again, and not only once."""

from __future__ import annotations

import ast

from torchmedic.evidence.leaks.source.sites import Site, nodes_of
from torchmedic.source.assignments import flat


def begins_again(start: Site, starts: list[Site], puts: list[Site], files: list[str]) -> bool:
    """Whether a line makes a holder anew again and again.

    Args:
        start: The line.
        starts: All lines that make the holder anew.
        puts: The lines that fill it.
        files: The user's.
    """
    if any(isinstance(node, ast.If) and _asks_for_none(node.test, start.node) for node in start.path):
        return False  # `if ema is None: ema = loss`
    targets = list(flat(getattr(start.node, "targets", [])))
    is_item = isinstance(start.node, ast.Call) or any(isinstance(each, ast.Subscript) for each in targets)
    if is_item and start.is_guarded:
        return False  # `if name not in history: history[name] = []`
    filled = [loop for site in puts for loop in site.path]
    if any(loop in filled for loop in start.loops):
        return True
    function = start.function
    if function is None:
        return False
    if start.builds:
        return _is_built_again(start, files)
    is_attribute = any(isinstance(each, ast.Attribute) for each in targets)
    return (is_attribute and len(starts) > 1) or ((is_attribute or is_item) and _is_called_again(start, files))


def _is_built_again(start: Site, files: list[str]) -> bool:
    """Whether `__init__` is called once more on an object that exists: `meter.__init__()`."""
    for file in dict.fromkeys([start.file, *files]):
        for node, _ in nodes_of(file):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="__init__", value=ast.Name(id=whose) | ast.Attribute(attr=whose))
                ):
                    names = [getattr(each, "id", "") for each in node.args]
                    if "self" not in names and whose[:1].islower():  # not `Base.__init__(self)`
                        return True
    return False


def _is_called_again(start: Site, files: list[str]) -> bool:
    """Whether the function that makes it anew is called at several places, or in a loop: `meter.reset()`."""
    name = getattr(start.function, "name", "")
    owner = next((each for each in reversed(start.path) if isinstance(each, ast.ClassDef)), None)
    calls = []
    for file in dict.fromkeys([start.file, *files]):
        for node, path in nodes_of(file):
            match node:
                case ast.Call(func=ast.Attribute(attr=attribute, value=whose)) if attribute == name:
                    is_own = isinstance(whose, ast.Name) and whose.id == "self"
                    calls += [Site(file, node, None, path)] if not is_own or owner in path else []
                case ast.Call(func=ast.Name(id=function)) if function == name and owner is None:
                    calls.append(Site(file, node, None, path))
    return len(calls) > 1 or any(site.loops for site in calls)


def _asks_for_none(test: ast.expr, assignment: ast.AST) -> bool:
    """Whether a condition asks if the variable that is assigned below it has no value yet."""
    targets = getattr(assignment, "targets", None) or [getattr(assignment, "target", None)]
    names = {ast.dump(target).replace("Store()", "Load()") for target in targets if target is not None}
    for part in ast.walk(test):
        match part:
            case ast.UnaryOp(op=ast.Not(), operand=asked) if ast.dump(asked) in names:
                return True
            case ast.Compare(left=asked, ops=[ast.Is() | ast.IsNot() | ast.Eq()]) if ast.dump(asked) in names:
                return True
    return False
