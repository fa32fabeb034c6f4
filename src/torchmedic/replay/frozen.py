"""Where parameters were frozen: the statement that set `requires_grad` to False."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable

import torch

from torchmedic.observe.frames import is_user_file
from torchmedic.records import Location
from torchmedic.replay.frames import Frame, node_location, syntax_tree


def where_frozen(frames: list[Frame], modules: Iterable[torch.nn.Module]) -> Location | None:
    """The line that freezes parameters, if all of these modules are frozen and such a line exists."""
    parameters = [tensor for module in modules for tensor in module.parameters()]
    if any(tensor.requires_grad for tensor in parameters):
        return None
    files = [frame.file for frame in reversed(frames) if frame.is_user]
    files += [
        module.__file__
        for module in list(sys.modules.values())
        if isinstance(getattr(module, "__file__", None), str) and module.__file__ and is_user_file(module.__file__)
    ]
    for file in dict.fromkeys(files):
        for node in ast.walk(syntax_tree(file) or ast.Module([], [])):
            if _freezes(node):
                return node_location("cause", file, node, "every parameter is frozen here")
    return None


def _freezes(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        off = isinstance(node.value, ast.Constant) and node.value.value is False
        return off and isinstance(target, ast.Attribute) and target.attr == "requires_grad"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "requires_grad_":
        given = node.args[0] if node.args else next((word.value for word in node.keywords), None)
        return isinstance(given, ast.Constant) and given.value is False
    return False
