"""Which layer a node of the live graph belongs to, and the line that calls it, where no replay can tell.

A node of a layer leads to the layer's own weights: those name the layer. The line is the one call of it in the
`forward` of the user's class that holds it.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from types import CodeType

import torch

from torchmedic.evidence.memory.fake.ledger import Place
from torchmedic.source.live_frames import syntax_tree
from torchmedic.source.spots import Spot
from torchmedic.source.syntax import nodes_in
from torchmedic.source.user_code import is_user_file


class Layers:
    """The layers of all models by their weights."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._owner: dict[int, torch.nn.Module] = {}
        self._parent: dict[int, tuple[torch.nn.Module, str]] = {}
        self._known: dict[int, Place] = {}  # by the identity of a layer
        for module in modules:
            for parameter in module.__dict__.get("_parameters", {}).values():
                if parameter is not None:
                    self._owner[id(parameter)] = module
            for name, child in module.__dict__.get("_modules", {}).items():
                if child is not None:
                    self._parent[id(child)] = (module, name)

    def place(self, weights: Iterable[int]) -> Place | None:
        """The layer that has these weights, and the line that calls it."""
        owners = {id(found): found for each in weights if (found := self._owner.get(each)) is not None}
        if len(owners) != 1:
            return None
        (layer,) = owners.values()
        if id(layer) not in self._known:
            self._known[id(layer)] = self._find(layer)
        return self._known[id(layer)]

    def _find(self, layer: torch.nn.Module) -> Place:
        names: list[str] = []
        spot: Spot | None = None
        while id(layer) in self._parent and len(names) < 64:
            layer, name = self._parent[id(layer)]
            names.insert(0, name)
            spot = spot or _call(type(layer), name)
        return Place(spot, ".".join(names))


def _call(kind: type, name: str) -> Spot | None:
    """The one call of `self.<name>` in the `forward` of a class of the user's."""
    forward = inspect.unwrap(kind.__dict__["forward"]) if "forward" in kind.__dict__ else None
    code = getattr(forward, "__code__", None)
    if code is None or not code.co_argcount or not is_user_file(code.co_filename):
        return None
    tree = syntax_tree(code.co_filename)
    first = code.co_varnames[0]
    calls = [
        node
        for function in nodes_in(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "forward" and _begins(function, code)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{first}.{name}"
    ]
    if len(calls) != 1:
        return None
    call = calls[0]
    return Spot(code.co_filename, call.lineno, call.col_offset, call.end_lineno, call.end_col_offset, "forward")


def _begins(function: ast.FunctionDef, code: CodeType) -> bool:
    return min([function.lineno, *(each.lineno for each in function.decorator_list)]) == code.co_firstlineno
