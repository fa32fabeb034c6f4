"""What runs when a script is imported. A process that is not forked imports the script that started it once more."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from torchmedic.supervise.preflight.constants import name_of
from torchmedic.supervise.preflight.sources import Source

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_UNDER_CONDITION = (ast.If, ast.Try, ast.While, ast.Match, ast.ExceptHandler)


def is_guard(node: ast.AST) -> bool:
    """`if __name__ == "__main__":`."""
    if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Eq)):
        return False
    sides = [node.test.left, *node.test.comparators]
    names = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    return names and any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)


class Importing:
    """Follows the top of a script and what it calls of its own, but for what the guard keeps for the main process."""

    def __init__(self, script: Source) -> None:
        self._functions: dict[str, list[_Function]] = {}
        for node in ast.walk(script.tree):
            if isinstance(node, _Function):
                self._functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                made = [each for each in node.body if isinstance(each, _Function) and each.name == "__init__"]
                self._functions.setdefault(node.name, []).extend(made)
        self._entered: set[int] = set()
        self.certain: set[int] = set()  # ids of nodes that are reached under no condition
        self.nodes: list[ast.AST] = list(self._follow(script.tree.body, certain=True))

    def _follow(self, statements: Iterable[ast.AST], *, certain: bool) -> Iterator[ast.AST]:
        for node in statements:
            if is_guard(node):
                assert isinstance(node, ast.If)
                yield from self._follow(node.orelse, certain=False)
            elif isinstance(node, _Function | ast.Lambda):
                continue
            else:
                if certain:
                    self.certain.add(id(node))
                yield node
                inner = certain and not isinstance(node, _UNDER_CONDITION)
                yield from self._follow(ast.iter_child_nodes(node), certain=inner)
                if isinstance(node, ast.Call):
                    yield from self._enter(node, certain=certain)

    def _enter(self, call: ast.Call, *, certain: bool) -> Iterator[ast.AST]:
        known = self._functions.get(name_of(call), [])
        for function in known:
            if id(function) not in self._entered:
                self._entered.add(id(function))
                yield from self._follow(function.body, certain=certain and len(known) == 1)
